//! What a scheduler says about a gang that it has not placed.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use crate::object::Foreign;

/// Bytes of a message that fit into a status line.
const LONGEST: usize = 300;
/// Conditions of gang objects that hold when all is well.
const GOOD: [&str; 3] = ["PodGroupScheduled", "PodGroupInitiallyScheduled", "Scheduled"];
/// Conditions of gang objects that hold when it is not.
const BAD: [&str; 2] = ["Unschedulable", "UnschedulableOnNodePool"];

/// The word of the gang's object, else what most pods are told; shortened. `None` if nobody complains.
pub(crate) fn scheduler_message(pods: &[&Pod], gang: Option<&Foreign>) -> Option<String> {
    let message = gang.and_then(of_object).or_else(|| of_pods(pods))?;
    Some(shorten(&message))
}

fn of_object(gang: &Foreign) -> Option<String> {
    let lists = [&gang.status["conditions"], &gang.status["schedulingConditions"]];
    let mut conditions = lists.into_iter().filter_map(Value::as_array).flatten();
    let complains = |condition: &&Value| {
        let kind = condition["type"].as_str().unwrap_or_default();
        let holds = condition["status"].as_str() == Some("True");
        (GOOD.contains(&kind) && !holds) || (BAD.contains(&kind) && holds)
    };
    // The last one is the newest.
    let condition = conditions.rfind(complains)?;
    let text = |field: &str| condition[field].as_str().filter(|text| !text.is_empty());
    text("message").or_else(|| text("reason")).map(str::to_owned)
}

/// The message that most unbound pods have; gates that we set say nothing new.
fn of_pods(pods: &[&Pod]) -> Option<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for pod in pods {
        let conditions =
            pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let told = conditions.iter().find(|c| {
            c.type_ == "PodScheduled" && c.status == "False" && c.reason.as_deref() != Some("SchedulingGated")
        });
        if let Some(message) = told.and_then(|c| c.message.as_deref()).filter(|m| !m.is_empty()) {
            *counts.entry(message).or_default() += 1;
        }
    }
    let (message, _) = counts.into_iter().max_by_key(|(message, count)| (*count, Reverse(*message)))?;
    Some(message.to_owned())
}

fn shorten(message: &str) -> String {
    let message = message.trim();
    if message.len() <= LONGEST {
        return message.to_owned();
    }
    let mut end = LONGEST - 3;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}...", message[..end].trim_end())
}
