//! A pod's container arguments as the flags of what runs in it, with what only this machine knows added.

use deepinfer_agent::AgentArgs;
use deepinfer_crds::names::label;
use deepinfer_gateway::args::GatewayArgs;
use k8s_openapi::api::core::v1::Pod;

use super::target::ModelSizes;

/// What a pod runs.
#[derive(Clone, Debug)]
pub enum Container {
    /// An agent.
    Agent(Box<AgentArgs>),
    /// A gateway.
    Gateway(Box<GatewayArgs>),
}

/// What only this machine knows.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// Bytes that each agent may take beside the weights.
    pub memory: Option<u64>,
    /// Further flags of the gateway.
    pub gateway: Vec<String>,
}

/// Label of a pod.
pub fn pod_label<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(name).map(String::as_str)
}

/// Name of a pod.
pub fn pod_name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// Whether the pod runs a gateway.
pub fn is_gateway(pod: &Pod) -> bool {
    pod_label(pod, label::ROLE) == Some("gateway")
}

/// Reads what a pod runs.
///
/// # Errors
/// What is wrong with a flag, and which field of the file it came from.
pub fn container(pod: &Pod, extras: &Extras) -> Result<Container, String> {
    let args = pod.spec.as_ref().and_then(|spec| spec.containers.first()?.args.clone()).unwrap_or_default();
    // The only variable that templates use, as the kubelet expands it.
    let mut flags: Vec<String> = args.iter().map(|arg| arg.replace("$(POD_NAME)", pod_name(pod))).collect();
    if is_gateway(pod) {
        flags.extend(extras.gateway.iter().cloned());
        let args =
            GatewayArgs::from_flags(&flags).map_err(|error| format!("gateway: {}", one_line(&error)))?;
        return Ok(Container::Gateway(Box::new(args)));
    }
    let own = [
        Some("--data-listen=127.0.0.1:0".to_owned()),
        Some("--control-listen=127.0.0.1:0".to_owned()),
        extras.memory.map(|bytes| format!("--memory={bytes}")),
    ];
    for flag in own.into_iter().flatten() {
        let name = flag.split('=').next().unwrap_or_default();
        if !flags.iter().any(|given| given == name || given.starts_with(&format!("{name}="))) {
            flags.push(flag);
        }
    }
    let args = AgentArgs::from_flags(&flags);
    args.map(|args| Container::Agent(Box::new(args)))
        .map_err(|error| format!("spec.engine.extraArgs: {}", one_line(&error)))
}

/// Checks what a pod runs, its sizes included.
///
/// # Errors
/// As [`container`], and sizes that do not fit.
pub fn check(pod: &Pod, extras: &Extras, sizes: Option<&ModelSizes>) -> Result<(), String> {
    match (container(pod, extras)?, sizes) {
        (Container::Agent(args), Some(sizes)) => match sizes.sizing(&args) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("spec.engine.extraArgs: {error}")),
        },
        _ => Ok(()),
    }
}

/// Longest sequence that all these pods take; `None` if nothing is known of the model.
pub fn context_limit<'a>(
    pods: impl Iterator<Item = &'a Pod>,
    extras: &Extras,
    sizes: Option<&ModelSizes>,
) -> Option<u32> {
    let sizes = sizes?;
    let limits = pods.filter_map(|pod| match container(pod, extras).ok()? {
        Container::Agent(args) => sizes.sizing(&args).ok().map(|sizing| sizing.context_limit),
        Container::Gateway(_) => None,
    });
    limits.min()
}

/// What clap says, without the usage that belongs to a program of its own.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty() && !line.starts_with("For more")).collect();
    lines.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(role: &str, args: &[&str]) -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p-0", "labels": {label::ROLE: role}},
            "spec": {"containers": [{"name": "c", "args": args}]},
        }))
        .expect("a pod")
    }

    #[test]
    fn the_name_is_expanded_and_a_given_flag_wins() {
        let args = ["--name=$(POD_NAME)", "--role=prefill", "--checkpoint=/m", "--memory=5MiB"];
        let extras = Extras { memory: Some(7), ..Extras::default() };
        let Ok(Container::Agent(args)) = container(&pod("prefill", &args), &extras) else {
            panic!("an agent")
        };
        assert_eq!((args.name.as_str(), args.memory), ("p-0", Some(5 << 20)));
        assert!(args.data_address().ip().is_loopback() && args.control_address().port() == 0);
    }

    #[test]
    fn a_wrong_flag_is_named_with_the_field_it_came_from() {
        let args = ["--name=$(POD_NAME)", "--role=prefill", "--checkpoint=/m", "--numerics=f16"];
        let error = check(&pod("prefill", &args), &Extras::default(), None).expect_err("a wrong flag");
        assert!(error.starts_with("spec.engine.extraArgs: ") && error.contains("--numerics"), "{error}");
        assert!(!error.contains('\n') && !error.contains("Usage"), "{error}");
    }
}
