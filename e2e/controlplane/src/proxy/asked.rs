//! What a request to the API server asks: verb, kind, name, as the server's own request info has them.

use http::Method;
use http::header::{CONTENT_TYPE, USER_AGENT};
use http::request::Parts;
use serde::Deserialize;

/// What is done to an object or a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verb {
    /// One object is read.
    Get,
    /// A list is read.
    List,
    /// Changes are followed.
    Watch,
    /// An object is made.
    Create,
    /// An object is replaced.
    Update,
    /// An object is changed by a patch that is no server-side apply.
    Patch,
    /// Server-side apply.
    Apply,
    /// One object is deleted.
    Delete,
    /// A list is deleted.
    DeleteList,
    /// A write that is only tried (`dryRun=All`).
    DryRun,
    /// Not about objects: discovery, health, metrics.
    Other,
}

impl Verb {
    /// Whether it changes something.
    pub fn writes(self) -> bool {
        matches!(
            self,
            Self::Create | Self::Update | Self::Patch | Self::Apply | Self::Delete | Self::DeleteList
        )
    }
}

/// A request, read from its head (and the name of a new object from its body).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// HTTP method.
    pub method: String,
    /// Path without query.
    pub path: String,
    /// Query, empty without.
    pub query: String,
    /// What is done.
    pub verb: Verb,
    /// API group; empty for the core group and where nothing is asked of objects.
    pub group: String,
    /// Plural of the kind, as in the path; empty where nothing is asked of objects.
    pub resource: String,
    /// `status`, `scale`, `token`, ...
    pub subresource: String,
    /// Empty for objects without and for lists over all namespaces.
    pub namespace: String,
    /// Empty for lists.
    pub name: String,
    /// Who says it asks.
    pub user_agent: String,
}

impl Asked {
    /// Reads a request's head and, of a create, the object's name.
    pub(super) fn of(parts: &Parts, body: &[u8]) -> Self {
        let text = |name| parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("").to_owned();
        let path = parts.uri.path().to_owned();
        let query = parts.uri.query().unwrap_or("").to_owned();
        let mut asked = Self {
            method: parts.method.as_str().to_owned(),
            path,
            query,
            verb: Verb::Other,
            group: String::new(),
            resource: String::new(),
            subresource: String::new(),
            namespace: String::new(),
            name: String::new(),
            user_agent: text(USER_AGENT),
        };
        if asked.read_path() {
            asked.verb = verb(&parts.method, &asked, &text(CONTENT_TYPE));
            if asked.verb == Verb::Create && asked.name.is_empty() {
                asked.name = name_in(body);
            }
        }
        asked
    }

    /// `pods`, or `pods/status` with a subresource.
    pub fn kind(&self) -> String {
        if self.subresource.is_empty() {
            self.resource.clone()
        } else {
            format!("{}/{}", self.resource, self.subresource)
        }
    }

    /// Fills group, namespace, resource, name and subresource; false if the path names no objects.
    fn read_path(&mut self) -> bool {
        let parts: Vec<String> =
            self.path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        let mut rest: &[String] = match parts.first().map(String::as_str) {
            Some("api") if parts.len() > 2 => &parts[2..],
            Some("apis") if parts.len() > 3 => {
                self.group.clone_from(&parts[1]);
                &parts[3..]
            }
            _ => return false,
        };
        if rest[0] == "namespaces" && rest.len() > 1 {
            self.namespace.clone_from(&rest[1]);
            let of_the_namespace = rest.get(2).is_none_or(|part| part == "status" || part == "finalize");
            if !of_the_namespace {
                rest = &rest[2..];
            }
        }
        let part = |at: usize| rest.get(at).cloned().unwrap_or_default();
        (self.resource, self.name, self.subresource) = (part(0), part(1), part(2));
        true
    }
}

fn verb(method: &Method, asked: &Asked, content_type: &str) -> Verb {
    let one = !asked.name.is_empty();
    let asks = |pair: &str| asked.query.split('&').any(|part| part == pair);
    let watches = asks("watch=true") || asks("watch=1");
    if asks("dryRun=All") {
        return Verb::DryRun;
    }
    match *method {
        Method::GET | Method::HEAD if watches => Verb::Watch,
        Method::GET | Method::HEAD if one => Verb::Get,
        Method::GET | Method::HEAD => Verb::List,
        Method::POST => Verb::Create,
        Method::PUT => Verb::Update,
        Method::PATCH if content_type.starts_with("application/apply-patch") => Verb::Apply,
        Method::PATCH => Verb::Patch,
        Method::DELETE if one => Verb::Delete,
        Method::DELETE => Verb::DeleteList,
        _ => Verb::Other,
    }
}

/// `metadata.name` of an object in JSON.
fn name_in(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Named {
        metadata: Name,
    }
    #[derive(Deserialize)]
    struct Name {
        #[serde(default)]
        name: String,
    }
    serde_json::from_slice::<Named>(body).map(|named| named.metadata.name).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn asked(method: &str, uri: &str, kind: &str, body: &str) -> Asked {
        let request = Request::builder().method(method).uri(uri).header(CONTENT_TYPE, kind).body(()).unwrap();
        Asked::of(&request.into_parts().0, body.as_bytes())
    }

    #[test]
    fn verbs_and_names_are_read_as_the_server_reads_them() {
        let apply = "application/apply-patch+yaml";
        let body = r#"{"kind":"Pod","metadata":{"name":"new"}}"#;
        for (method, uri, kind, verb, namespace, resource, name) in [
            ("GET", "/api/v1/namespaces/a/pods/p", "", Verb::Get, "a", "pods", "p"),
            ("GET", "/api/v1/namespaces/a/pods", "", Verb::List, "a", "pods", ""),
            ("GET", "/api/v1/pods?limit=5&watch=true", "", Verb::Watch, "", "pods", ""),
            ("GET", "/api/v1/namespaces/a", "", Verb::Get, "a", "namespaces", "a"),
            ("PUT", "/api/v1/namespaces/a/finalize", "", Verb::Update, "a", "namespaces/finalize", "a"),
            ("POST", "/api/v1/namespaces/a/pods", "application/json", Verb::Create, "a", "pods", "new"),
            ("POST", "/api/v1/namespaces/a/pods/p/binding", "", Verb::Create, "a", "pods/binding", "p"),
            (
                "PATCH",
                "/apis/apps/v1/namespaces/a/deployments/d",
                apply,
                Verb::Apply,
                "a",
                "deployments",
                "d",
            ),
            ("PATCH", "/api/v1/nodes/n/status", "application/json", Verb::Patch, "", "nodes/status", "n"),
            ("DELETE", "/api/v1/namespaces/a/pods/p", "", Verb::Delete, "a", "pods", "p"),
            ("DELETE", "/api/v1/namespaces/a/pods", "", Verb::DeleteList, "a", "pods", ""),
            ("POST", "/api/v1/namespaces/a/pods?dryRun=All", "", Verb::DryRun, "a", "pods", ""),
        ] {
            let asked = asked(method, uri, kind, body);
            let read = (asked.verb, asked.namespace.as_str(), asked.kind(), asked.name.as_str());
            assert_eq!(read, (verb, namespace, resource.to_owned(), name), "{method} {uri}");
        }
    }

    #[test]
    fn discovery_and_health_are_not_about_objects() {
        for uri in ["/readyz", "/version", "/api", "/api/v1", "/apis", "/apis/apps/v1", "/openapi/v3"] {
            let asked = asked("GET", uri, "", "");
            assert_eq!((asked.verb, asked.resource.as_str()), (Verb::Other, ""), "{uri}");
        }
        assert_eq!(asked("GET", "/apis/deepinfer.io/v1alpha1/supernodes", "", "").group, "deepinfer.io");
    }
}
