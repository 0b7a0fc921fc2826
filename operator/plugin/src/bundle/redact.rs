//! Takes out of objects and logs what nobody outside should read.
//! Invariant: names of variables, flags and keys stay, since they explain; their values go.

use serde_json::{Map, Value};

/// What stands in place of a value.
pub const REDACTED: &str = "REDACTED";

/// Words in the name of a flag whose value is a credential.
const SECRET_WORDS: [&str; 5] = ["key", "token", "secret", "password", "credential"];

/// An object without values of environment variables, credentials in flags, texts of configuration, and without the
/// metadata that repeats them.
pub fn object(value: &mut Value) {
    if let Some(meta) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.remove("managedFields");
        if let Some(annotations) = meta.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }
    node(value);
}

fn node(value: &mut Value) {
    match value {
        Value::Object(map) => fields(map),
        Value::Array(list) => list.iter_mut().for_each(node),
        _ => {}
    }
}

fn fields(map: &mut Map<String, Value>) {
    for (name, child) in map.iter_mut() {
        match name.as_str() {
            "env" => variables(child),
            "args" | "command" | "extraArgs" | "engineArgs" => flags(child),
            // The engine's configuration is the user's own text.
            "config" => values(child),
            _ => node(child),
        }
    }
}

fn variables(list: &mut Value) {
    for variable in list.as_array_mut().into_iter().flatten() {
        if let Some(value) = variable.get_mut("value") {
            *value = REDACTED.into();
        }
    }
}

fn values(map: &mut Value) {
    match map {
        Value::Object(map) => map.values_mut().for_each(|v| *v = REDACTED.into()),
        other => node(other),
    }
}

/// `--api-key=x` and `--api-key x`.
fn flags(list: &mut Value) {
    let Some(list) = list.as_array_mut() else { return };
    let mut next = false;
    for flag in list.iter_mut() {
        let Some(text) = flag.as_str() else { continue };
        if std::mem::take(&mut next) && !text.starts_with("--") {
            *flag = REDACTED.into();
            continue;
        }
        let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
        if !name.starts_with('-') || !is_secret(name) {
            continue;
        }
        match value {
            // Where a credential lies is no credential.
            Some(value) if !value.starts_with('/') => *flag = format!("{name}={REDACTED}").into(),
            Some(_) => {}
            None => next = true,
        }
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// A ConfigMap: what our operator writes stays, what a user wrote goes.
pub fn config_map(value: &mut Value, ours: bool) {
    object(value);
    if ours {
        return;
    }
    for part in ["data", "binaryData"] {
        if let Some(data) = value.get_mut(part) {
            values(data);
        }
    }
}

/// A log line without credentials of HTTP.
pub fn line(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((at, scheme)) = first_scheme(rest) {
        let (before, after) = rest.split_at(at + scheme.len());
        out += before;
        let end = after
            .find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '}'))
            .unwrap_or(after.len());
        if end > 0 {
            out += REDACTED;
        }
        rest = &after[end..];
    }
    out + rest
}

fn first_scheme(text: &str) -> Option<(usize, &'static str)> {
    ["Bearer ", "bearer ", "Basic ", "DeepInfer ", "sk-"]
        .into_iter()
        .filter_map(|s| Some((text.find(s)?, s)))
        .min()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_stay_and_values_go() {
        let mut pod = json!({
            "metadata": {"name": "p", "managedFields": [], "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": "{\"env\": \"hunter2\"}", "a": "b"}},
            "spec": {"containers": [{
                "name": "engine",
                "env": [{"name": "A", "value": "hunter2"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                "args": ["--api-key=hunter2", "--token", "hunter2", "--key-dir=/var/keys", "--max-batch=5"],
            }]},
        });
        object(&mut pod);
        assert!(!pod.to_string().contains("hunter2"), "{pod}");
        let container = &pod["spec"]["containers"][0];
        assert_eq!(
            container["args"],
            json!(["--api-key=REDACTED", "--token", "REDACTED", "--key-dir=/var/keys", "--max-batch=5"])
        );
        assert_eq!(container["env"][0], json!({"name": "A", "value": "REDACTED"}));
        assert_eq!(container["env"][1]["valueFrom"]["secretKeyRef"]["name"], "s");
        assert_eq!(pod["metadata"]["annotations"], json!({"a": "b"}));
    }

    #[test]
    fn the_users_configuration_goes_and_the_operators_stays() {
        let map = json!({"metadata": {"name": "m"}, "data": {"k": "v"}});
        let (mut theirs, mut ours) = (map.clone(), map);
        config_map(&mut theirs, false);
        config_map(&mut ours, true);
        assert_eq!((&theirs["data"]["k"], &ours["data"]["k"]), (&json!("REDACTED"), &json!("v")));
        let mut cluster = json!({"spec": {"engine": {"config": {"k": "v"}}}});
        object(&mut cluster);
        assert_eq!(cluster["spec"]["engine"]["config"]["k"], "REDACTED");
    }

    #[test]
    fn credentials_in_logs_go() {
        let said =
            line("got Authorization: Bearer abc.def from 10.0.0.1, DeepInfer 17.aa\" and \"sk-12\" ok");
        assert_eq!(
            said,
            "got Authorization: Bearer REDACTED from 10.0.0.1, DeepInfer REDACTED\" and \"sk-REDACTED\" ok"
        );
        assert_eq!(line("nothing here"), "nothing here");
    }
}
