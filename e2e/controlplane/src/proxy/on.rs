//! Which requests are meant: by faults, by holds and by whoever counts.

use super::asked::{Asked, Verb};

/// A choice of requests. Everything that is not named is free; leases are left out unless they are named, because
/// their renewals come by the clock and would make "the third write" another one in each run.
#[derive(Clone, Debug, Default)]
pub struct On {
    verbs: Vec<Verb>,
    kinds: Vec<String>,
    not: Vec<String>,
    name: Option<String>,
    namespace: Option<String>,
    agent: Option<String>,
}

impl On {
    /// All requests.
    pub fn any() -> Self {
        Self::default()
    }

    /// All requests that change something.
    pub fn writes() -> Self {
        Self::verbs(&[Verb::Create, Verb::Update, Verb::Patch, Verb::Apply, Verb::Delete, Verb::DeleteList])
    }

    /// Requests with one of these verbs.
    pub fn verbs(verbs: &[Verb]) -> Self {
        Self { verbs: verbs.to_vec(), ..Self::default() }
    }

    /// Only of this kind: its plural, or `plural/subresource`. Said several times, each of them is meant; a plural
    /// alone does not mean its subresources.
    #[must_use]
    pub fn kind(mut self, kind: &str) -> Self {
        self.kinds.push(kind.to_owned());
        self
    }

    /// Not of this kind.
    #[must_use]
    pub fn not(mut self, kind: &str) -> Self {
        self.not.push(kind.to_owned());
        self
    }

    /// Only of objects whose name fits the pattern; `*` stands for any text.
    #[must_use]
    pub fn name(mut self, pattern: &str) -> Self {
        self.name = Some(pattern.to_owned());
        self
    }

    /// Only in this namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// Only from programs whose user agent fits the pattern.
    #[must_use]
    pub fn agent(mut self, pattern: &str) -> Self {
        self.agent = Some(pattern.to_owned());
        self
    }

    /// Whether a request is meant.
    pub fn matches(&self, asked: &Asked) -> bool {
        let kind = asked.kind();
        let named = self.kinds.contains(&kind);
        (self.verbs.is_empty() || self.verbs.contains(&asked.verb))
            && (named || self.kinds.is_empty() && asked.resource != "leases")
            && !self.not.contains(&kind)
            && self.name.as_deref().is_none_or(|pattern| fits(pattern, &asked.name))
            && self.namespace.as_deref().is_none_or(|namespace| namespace == asked.namespace)
            && self.agent.as_deref().is_none_or(|pattern| fits(pattern, &asked.user_agent))
    }
}

/// Whether a text fits a pattern in which `*` stands for any text.
pub fn fits(pattern: &str, text: &str) -> bool {
    let Some((head, mut rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(head) else { return false };
    while let Some((part, after)) = rest.split_once('*') {
        let Some(at) = text.find(part) else { return false };
        text = &text[at + part.len()..];
        rest = after;
    }
    text.ends_with(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(verb: Verb, resource: &str, subresource: &str, name: &str) -> Asked {
        Asked {
            method: String::new(),
            path: String::new(),
            query: String::new(),
            verb,
            group: String::new(),
            resource: resource.into(),
            subresource: subresource.into(),
            namespace: "ns".into(),
            name: name.into(),
            user_agent: "operator/1".into(),
        }
    }

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, text, fit) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*c", "ac", true),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "axxc", false),
            ("ab*bc", "abc", false),
        ] {
            assert_eq!(fits(pattern, text), fit, "{pattern} {text}");
        }
    }

    #[test]
    fn leases_are_meant_only_by_name() {
        let lease = asked(Verb::Update, "leases", "", "l");
        assert!(!On::writes().matches(&lease));
        assert!(On::writes().kind("leases").matches(&lease));
    }

    #[test]
    fn each_part_narrows_the_choice() {
        let status = asked(Verb::Apply, "pods", "status", "c-decode-x-00");
        assert!(On::writes().matches(&status));
        assert!(!On::writes().kind("pods").matches(&status));
        assert!(On::writes().kind("pods").kind("pods/status").matches(&status));
        assert!(!On::writes().not("pods/status").matches(&status));
        assert!(!On::verbs(&[Verb::Create]).matches(&status));
        assert!(On::any().name("c-decode-*").namespace("ns").agent("operator/*").matches(&status));
        assert!(!On::any().name("d-*").matches(&status));
        assert!(!On::any().namespace("other").matches(&status));
        assert!(!On::any().agent("kubectl*").matches(&status));
    }
}
