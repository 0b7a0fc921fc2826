//! Text of a container, made real: `$(VAR)` as Kubernetes defines it, and mount paths that become folders.
//!
//! A process node cannot mount. It writes each volume into a folder of the pod and says that folder wherever the
//! container's command, arguments or environment say the mount path.

use std::path::PathBuf;

/// Expands `$(NAME)` by `lookup`; `$$` is a plain `$`, and a name that is not known stays as it is written.
pub(crate) fn expand(text: &str, lookup: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix("$$") {
            out.push('$');
            rest = after;
            continue;
        }
        let reference = rest.strip_prefix("$(").and_then(|inner| inner.split_once(')'));
        match reference {
            Some((name, after)) => {
                match lookup(name) {
                    Some(value) => out.push_str(&value),
                    None => out.push_str(&rest[..name.len() + 3]),
                }
                rest = after;
            }
            None => {
                out.push('$');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// The mounts of one container: what it calls a path, and where that is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mounts(Vec<(String, PathBuf)>);

impl Mounts {
    /// Mounts, longest path first, so that a mount inside another wins.
    pub(crate) fn new(pairs: impl IntoIterator<Item = (String, PathBuf)>) -> Self {
        let trimmed = pairs.into_iter().map(|(path, real)| (path.trim_end_matches('/').to_owned(), real));
        let mut pairs: Vec<_> = trimmed.filter(|(path, _)| !path.is_empty()).collect();
        pairs.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        Mounts(pairs)
    }

    /// `text` with every mount path in it replaced. A path counts where it stands alone: not in the middle of another
    /// path or word.
    pub(crate) fn apply(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() {
            let rest = &text[at..];
            let hit = self.0.iter().find(|(path, _)| {
                rest.strip_prefix(path.as_str())
                    .is_some_and(|after| starts_here(&text[..at]) && ends_here(after))
            });
            match hit {
                Some((path, real)) => {
                    out.push_str(&real.to_string_lossy());
                    at += path.len();
                }
                None => {
                    let next = rest.chars().next().expect("the rest is not empty");
                    out.push(next);
                    at += next.len_utf8();
                }
            }
        }
        out
    }
}

/// Whether a path can start after `before`. `file:///models` holds the path `/models`.
fn starts_here(before: &str) -> bool {
    before.ends_with("://") || !before.ends_with(|c: char| c.is_alphanumeric() || "_-./".contains(c))
}

fn ends_here(after: &str) -> bool {
    !after.starts_with(|c: char| c.is_alphanumeric() || "_-.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(name: &str) -> Option<String> {
        (name == "POD").then(|| "p-0".to_owned())
    }

    #[test]
    fn references_expand_as_kubernetes_defines_them() {
        for (text, want) in [
            ("--name=$(POD)", "--name=p-0"),
            ("$(POD)$(POD)", "p-0p-0"),
            ("$$(POD)", "$(POD)"),
            ("$$$(POD)", "$p-0"),
            ("$(OTHER) stays", "$(OTHER) stays"),
            ("cost 5$", "cost 5$"),
            ("$(open", "$(open"),
            ("${POD}", "${POD}"),
        ] {
            assert_eq!(expand(text, known), want, "{text}");
        }
    }

    #[test]
    fn mount_paths_become_folders_where_they_stand_alone() {
        let mounts = Mounts::new([
            ("/etc/keys".to_owned(), PathBuf::from("/t/k")),
            ("/etc/keys/deep/".to_owned(), PathBuf::from("/t/d")),
            ("/models".to_owned(), PathBuf::from("/t/m")),
        ]);
        for (text, want) in [
            ("--key-dir=/etc/keys", "--key-dir=/t/k"),
            ("/etc/keys/1:/etc/keys/deep/2", "/t/k/1:/t/d/2"),
            ("cat /etc/keys/a > /models/b; ls /models", "cat /t/k/a > /t/m/b; ls /t/m"),
            ("file:///models/x", "file:///t/m/x"),
            ("/etc/keyspace /my/models x/models /models2", "/etc/keyspace /my/models x/models /models2"),
            ("é/models", "é/models"),
        ] {
            assert_eq!(mounts.apply(text), want, "{text}");
        }
    }
}
