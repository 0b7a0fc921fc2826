//! What a plan changes, as text that a person reads.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use crate::action::Action;
use crate::naming::canonical;
use crate::object::Object;
use crate::plan::Plan;
use crate::world::World;

/// Lists the actions of a plan: what is made, what changes field by field, what goes and why.
pub fn describe(world: &World, plan: &Plan) -> String {
    let mut text = String::new();
    for action in &plan.actions {
        match action {
            Action::Apply(object) if world.objects.contains_key(&object.key()) => {
                let _ = writeln!(text, "~ {}", object.key());
                if let Some(live) = world.objects.get(&object.key()) {
                    fields(&mut text, live, object);
                }
            }
            Action::Apply(object) | Action::Create(object) | Action::DeriveKey { secret: object, .. } => {
                let _ = writeln!(text, "+ {}{}", object.key(), summary(object));
            }
            Action::Delete { key, why, .. } => {
                let _ = writeln!(text, "- {key}  ({why})");
            }
            Action::Status { key, status } => {
                let _ = writeln!(text, "  status {key}{}", status_line(status));
            }
            Action::Finalizers { .. }
            | Action::Pod { .. }
            | Action::Replicas { .. }
            | Action::CallAgent { .. }
            | Action::Event { .. } => {
                let _ = writeln!(text, "  {action}");
            }
        }
    }
    text
}

/// What a new object is, in a few words.
fn summary(object: &Object) -> String {
    match object {
        Object::Pool(pool) => {
            format!("  ({} replicas, revision {})", pool.spec.max_replicas, pool.spec.revision)
        }
        Object::Supernode(sn) => {
            format!("  ({} pods x {} ranks)", sn.spec.nodes, sn.spec.accelerators_per_node)
        }
        Object::Deployment(deployment) => {
            let replicas = deployment.spec.as_ref().and_then(|s| s.replicas).unwrap_or(1);
            format!("  ({replicas} pods)")
        }
        Object::Pod(pod) => {
            let args = pod.spec.as_ref().and_then(|s| s.containers.first()?.args.clone()).unwrap_or_default();
            format!("  ({})", args.join(" "))
        }
        _ => String::new(),
    }
}

fn status_line(status: &Value) -> String {
    let phase = status.get("phase").and_then(Value::as_str).map(|phase| format!("  phase {phase}"));
    let ready = status.get("conditions").and_then(Value::as_array).and_then(|list| {
        let ready = list.iter().find(|c| c["type"] == "Ready")?;
        Some(format!(", Ready={} {}", ready["status"].as_str()?, ready["reason"].as_str()?))
    });
    phase.unwrap_or_default() + &ready.unwrap_or_default()
}

/// Fields of `desired` that `live` has differently.
fn fields(text: &mut String, live: &Object, desired: &Object) {
    let mut changes = Vec::new();
    compare("", &live.to_value(), &desired.to_value(), &mut changes);
    for (path, before, after) in changes {
        if !path.starts_with(".metadata.annotations") {
            let _ = writeln!(text, "    {path}: {before} -> {after}");
        }
    }
}

fn compare(path: &str, live: &Value, desired: &Value, out: &mut Vec<(String, String, String)>) {
    match (live, desired) {
        (Value::Object(live), Value::Object(desired)) => {
            let sorted: BTreeMap<&String, &Value> = desired.iter().collect();
            for (key, value) in sorted {
                compare(&format!("{path}.{key}"), live.get(key).unwrap_or(&Value::Null), value, out);
            }
        }
        (Value::Array(live), Value::Array(desired)) if live.len() == desired.len() => {
            for (index, (live, desired)) in live.iter().zip(desired).enumerate() {
                compare(&format!("{path}[{index}]"), live, desired, out);
            }
        }
        _ if live == desired => {}
        _ => out.push((path.to_owned(), canonical(live), canonical(desired))),
    }
}
