//! What kwok does with nodes and pods, as its Stage objects.
//!
//! kwok looks at a pod whenever it changes and plays the one stage that fits. The stages exclude each other: two that fit
//! would be drawn by lot.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::{BEHAVIOUR, DELAY};

/// What becomes of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// It starts, and is ready as soon as its readiness gates are.
    Ready,
    /// It starts, and its container is never ready.
    NeverReady,
    /// It stays in ContainerCreating.
    NeverStarts,
    /// Its container ends with exit code 1, and with it the pod.
    Fails,
    /// It ends well.
    Completes,
    /// It stays Terminating when it is deleted.
    Stuck,
}

impl Behaviour {
    /// The value of the annotation [`BEHAVIOUR`].
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::NeverReady => "never-ready",
            Self::NeverStarts => "never-starts",
            Self::Fails => "fails",
            Self::Completes => "completes",
            Self::Stuck => "stuck",
        }
    }
}

/// How pods behave that have no annotation of their own.
#[derive(Clone, Debug)]
pub struct Stages {
    /// From binding to running.
    pub start: Duration,
    /// From deletion to gone.
    pub end: Duration,
    /// Regular expression on `namespace/name` and what becomes of these pods; the first that fits wins.
    pub pods: Vec<(String, Behaviour)>,
}

impl Default for Stages {
    fn default() -> Self {
        Self { start: Duration::ZERO, end: Duration::ZERO, pods: Vec::new() }
    }
}

impl Stages {
    /// The file for kwok's `--config`.
    pub(super) fn file(&self) -> String {
        let behaviour = self.behaviour();
        let is = |words: &[Behaviour]| {
            let words: Vec<&str> = words.iter().map(|word| word.word()).collect();
            expression(&behaviour, "In", &words)
        };
        let lives = || expression(".metadata.deletionTimestamp", "DoesNotExist", &[]);
        let deleted = || expression(".metadata.deletionTimestamp", "Exists", &[]);
        let phase = |phases: &[&str]| expression(".status.phase", "In", phases);
        let new = || expression(".status.podIP", "DoesNotExist", &[]);
        let healthy = [Behaviour::Ready, Behaviour::Stuck];
        let delay = json!({
            "durationMilliseconds": millis(self.start),
            "durationFrom": {"expressionFrom": format!(".metadata.annotations[{}]", quoted(DELAY))},
        });
        let end = json!({"durationMilliseconds": millis(self.end)});
        let status = |template: &str| json!({"statusTemplate": template});
        let documents = [
            stage("node", "Node", &[node_is_not_ready()], &json!({}), &status(NODE_READY)),
            stage("start", "Pod", &[lives(), new(), is(&healthy)], &delay, &status(&running(true))),
            stage("start-unready", "Pod", &[lives(), new(), is(&[Behaviour::NeverReady])], &delay, &{
                status(&running(false))
            }),
            stage("gates-open", "Pod", &[lives(), flips("True")], &json!({}), &status(&ready("True"))),
            stage("gates-shut", "Pod", &[lives(), flips("False")], &json!({}), &status(&ready("False"))),
            stage(
                "fail",
                "Pod",
                &[lives(), phase(&["Pending", "Running"]), is(&[Behaviour::Fails])],
                &delay,
                &status(&ended("Failed", "Error", 1)),
            ),
            stage(
                "complete",
                "Pod",
                &[lives(), phase(&["Pending", "Running"]), is(&[Behaviour::Completes])],
                &delay,
                &status(&ended("Succeeded", "Completed", 0)),
            ),
            stage(
                "delete",
                "Pod",
                &[deleted(), expression(&behaviour, "NotIn", &[Behaviour::Stuck.word()])],
                &end,
                &json!({"delete": true}),
            ),
        ];
        let mut file = String::new();
        for document in &documents {
            let _ = writeln!(file, "---\n{document}");
        }
        file
    }

    /// jq: the word of a pod's behaviour.
    fn behaviour(&self) -> String {
        let mut jq = format!("(.metadata.annotations[{}] // (", quoted(BEHAVIOUR));
        for (pattern, behaviour) in &self.pods {
            let test =
                format!("((.metadata.namespace + \"/\" + .metadata.name) | test({}))", quoted(pattern));
            let _ = write!(jq, "if {test} then {} else ", quoted(behaviour.word()));
        }
        jq.push_str(&quoted(Behaviour::Ready.word()));
        self.pods.iter().for_each(|_| jq.push_str(" end"));
        jq.push_str("))");
        jq
    }
}

fn stage(name: &str, kind: &str, expressions: &[Value], delay: &Value, next: &Value) -> Value {
    json!({
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": expressions},
            "delay": delay,
            "next": next,
        },
    })
}

fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
    if values.is_empty() {
        json!({"key": key, "operator": operator})
    } else {
        json!({"key": key, "operator": operator, "values": values})
    }
}

fn node_is_not_ready() -> Value {
    expression(".status.conditions.[] | select( .type == \"Ready\" ) | .status", "NotIn", &["True"])
}

/// Pods with running, ready containers whose Ready must become `status`, because of their readiness gates.
fn flips(status: &str) -> Value {
    let now = if status == "True" { "False" } else { "True" };
    let condition = |kind: &str, status: &str| {
        format!("any(.status.conditions[]?; .type == \"{kind}\" and .status == \"{status}\")")
    };
    let open = "(. as $pod | [.spec.readinessGates[]?.conditionType] \
                | all(.[]; . as $gate | any($pod.status.conditions[]?; .type == $gate and .status == \"True\")))";
    let open = if status == "True" { open.to_owned() } else { format!("({open} | not)") };
    let key = format!("{} and {} and {open}", condition("ContainersReady", "True"), condition("Ready", now));
    expression(&key, "In", &["true"])
}

/// A pod with its containers running; Ready waits for the readiness gates.
fn running(ready: bool) -> String {
    let ready_now = if ready { "{{ if .spec.readinessGates }}False{{ else }}True{{ end }}" } else { "False" };
    let containers = if ready { "True" } else { "False" };
    format!(
        r#"{{{{ $now := Now }}}}
conditions:
- {{type: Initialized, status: "True", lastTransitionTime: {{{{ $now | Quote }}}}}}
- {{type: PodReadyToStartContainers, status: "True", lastTransitionTime: {{{{ $now | Quote }}}}}}
- {{type: ContainersReady, status: "{containers}", lastTransitionTime: {{{{ $now | Quote }}}}}}
- {{type: Ready, status: "{ready_now}", lastTransitionTime: {{{{ $now | Quote }}}}}}
containerStatuses:
{{{{ range .spec.containers }}}}
- image: {{{{ .image | Quote }}}}
  imageID: {{{{ .image | Quote }}}}
  name: {{{{ .name | Quote }}}}
  ready: {ready}
  started: {ready}
  restartCount: 0
  state: {{running: {{startedAt: {{{{ $now | Quote }}}}}}}}
{{{{ end }}}}
hostIP: {{{{ NodeIPWith .spec.nodeName | Quote }}}}
podIP: {{{{ PodIPWith .spec.nodeName ( or .spec.hostNetwork false ) ( or .metadata.uid "" ) ( or .metadata.name "" ) ( or .metadata.namespace "" ) | Quote }}}}
phase: Running
startTime: {{{{ $now | Quote }}}}
"#
    )
}

fn ready(status: &str) -> String {
    let reason = if status == "True" { "" } else { ", reason: ReadinessGatesNotReady" };
    format!(
        r#"{{{{ $now := Now }}}}
conditions:
- {{type: Ready, status: "{status}"{reason}, lastTransitionTime: {{{{ $now | Quote }}}}}}
"#
    )
}

/// A pod whose containers have ended.
fn ended(phase: &str, reason: &str, code: u8) -> String {
    format!(
        r#"{{{{ $now := Now }}}}
conditions:
- {{type: Initialized, status: "True", lastTransitionTime: {{{{ $now | Quote }}}}}}
- {{type: ContainersReady, status: "False", reason: PodFailed, lastTransitionTime: {{{{ $now | Quote }}}}}}
- {{type: Ready, status: "False", reason: PodFailed, lastTransitionTime: {{{{ $now | Quote }}}}}}
containerStatuses:
{{{{ range .spec.containers }}}}
- image: {{{{ .image | Quote }}}}
  imageID: {{{{ .image | Quote }}}}
  name: {{{{ .name | Quote }}}}
  ready: false
  started: false
  restartCount: 0
  state: {{terminated: {{exitCode: {code}, reason: {reason}, startedAt: {{{{ $now | Quote }}}}, finishedAt: {{{{ $now | Quote }}}}}}}}
{{{{ end }}}}
phase: {phase}
"#
    )
}

const NODE_READY: &str = r#"{{ $now := Now }}
{{ $root := . }}
conditions:
{{ range NodeConditions }}
- lastHeartbeatTime: {{ $now | Quote }}
  lastTransitionTime: {{ or $root.metadata.creationTimestamp $now | Quote }}
  message: {{ .message | Quote }}
  reason: {{ .reason | Quote }}
  status: {{ .status | Quote }}
  type: {{ .type | Quote }}
{{ end }}
phase: Running
"#;

/// A string in jq (and in JSON).
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_a_list_of_documents_in_which_patterns_are_quoted() {
        let stages = Stages { pods: vec![(r#"^ns/a-"b\d+"#.into(), Behaviour::Fails)], ..Stages::default() };
        let file = stages.file();
        let documents: Vec<&str> = file.split("---\n").filter(|text| !text.is_empty()).collect();
        assert_eq!(documents.len(), 8);
        for document in &documents {
            let value: Value = serde_json::from_str(document).unwrap();
            assert_eq!(value["kind"], "Stage");
        }
        let words = stages.behaviour();
        assert!(words.contains(r#"test("^ns/a-\"b\\d+")) then "fails" else "ready" end))"#), "{words}");
    }
}
