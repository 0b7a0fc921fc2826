//! Laying one pod spec over another: the user's PodTemplate below, the operator's fields above.

use serde_json::Value;

/// Lists of pod specs whose items are merged by a key; what is not here is replaced, but for the lists that are joined.
const MERGED: [(&str, &str); 9] = [
    ("containers", "name"),
    ("initContainers", "name"),
    ("volumes", "name"),
    ("env", "name"),
    ("ports", "name"),
    ("volumeMounts", "mountPath"),
    ("imagePullSecrets", "name"),
    ("resourceClaims", "name"),
    ("readinessGates", "conditionType"),
];
/// Lists whose items are joined.
const JOINED: [&str; 1] = ["tolerations"];

/// Lays `above` over `below`: maps field by field, lists of named things by their names, everything else replaced.
/// Null above changes nothing.
pub(super) fn lay(below: &mut Value, above: &Value) {
    match (below, above) {
        (_, Value::Null) => {}
        (Value::Object(below), Value::Object(above)) => {
            for (field, above) in above {
                let below = below.entry(field.clone()).or_insert(Value::Null);
                let key = MERGED.iter().find(|(list, _)| list == field).map(|(_, key)| *key);
                match (below, above, key) {
                    (Value::Array(below), Value::Array(above), Some(key)) => by_key(below, above, key),
                    (Value::Array(below), Value::Array(above), None) if JOINED.contains(&field.as_str()) => {
                        let new: Vec<Value> =
                            above.iter().filter(|item| !below.contains(item)).cloned().collect();
                        below.extend(new);
                    }
                    (below, above, _) => lay(below, above),
                }
            }
        }
        (below, above) => *below = above.clone(),
    }
}

fn by_key(below: &mut Vec<Value>, above: &[Value], key: &str) {
    for item in above {
        match below.iter_mut().find(|known| !item[key].is_null() && known[key] == item[key]) {
            Some(known) => lay(known, item),
            None => below.push(item.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_operator_does_not_say_stays_as_the_user_wrote_it() {
        let mut pod = json!({
            "dnsPolicy": "None",
            "containers": [
                {"name": "log", "image": "log"},
                {"name": "engine", "image": "user", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            ],
            "tolerations": [{"key": "a"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
        });
        let ours = json!({
            "containers": [{"name": "engine", "image": "ours", "env": [{"name": "B", "value": "3"}], "args": ["x"]}],
            "tolerations": [{"key": "a"}, {"key": "b"}],
            "priorityClassName": null,
            "volumes": [{"name": "key"}],
        });
        lay(&mut pod, &ours);
        assert_eq!(
            pod,
            json!({
                "dnsPolicy": "None",
                "containers": [
                    {"name": "log", "image": "log"},
                    {"name": "engine", "image": "ours", "args": ["x"],
                     "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}]},
                ],
                "tolerations": [{"key": "a"}, {"key": "b"}],
                "priorityClassName": null,
                "volumes": [{"name": "v", "emptyDir": {}}, {"name": "key"}],
            })
        );
    }
}
