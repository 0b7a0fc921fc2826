//! What Ascend super pods need: marks for the Volcano plugin of the vendor, and host folders (operator.md 6.1.3).

use serde_json::{Value, json};

use super::list;
use crate::topology::Profile;

/// How the chips of a server are wired: 16 NPUs on 8 boards, in super pods.
const SCHEDULE_POLICY: &str = "chip8-node8-ra64-sp";

/// Marks metadata of a gang object or a pod: a super pod of `chips`, and no recovery but ours.
pub(super) fn super_pod(metadata: &mut Value, chips: u32) {
    metadata["annotations"]["huawei.com/schedule_policy"] = json!(SCHEDULE_POLICY);
    metadata["annotations"]["sp-block"] = json!(chips.to_string());
    metadata["annotations"]["sp-fit"] = json!("idlest");
    metadata["labels"]["fault-scheduling"] = json!("off");
}

/// Mounts the host paths of a profile into the engine container, read only; paths that the pod mounts itself stay.
pub(crate) fn host_mounts(profile: &Profile, pod: &mut Value) {
    for (at, path) in profile.host_mounts.iter().enumerate() {
        let mounts = list(&mut pod["spec"]["containers"][0]["volumeMounts"]);
        if mounts.iter().any(|mount| mount["mountPath"] == json!(path)) {
            continue;
        }
        let name = format!("host-{at}");
        mounts.push(json!({"name": name, "mountPath": path, "readOnly": true}));
        list(&mut pod["spec"]["volumes"]).push(json!({"name": name, "hostPath": {"path": path}}));
    }
}
