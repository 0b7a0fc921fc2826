//! Import arrows between the crates of this workspace (ARCHITECTURE.md).

use super::Finding;

/// What each crate may import from this workspace, in shipped code; dev-dependencies are free.
pub const ALLOWED_ARROWS: &[(&str, &[&str])] = &[
    ("deepinfer-kernels", &[]),
    ("deepinfer-protocol", &[]),
    ("deepinfer-crds", &[]),
    ("deepinfer-serving", &["deepinfer-protocol"]),
    ("deepinfer-planner", &["deepinfer-crds", "deepinfer-protocol"]),
    ("deepinfer-engine", &["deepinfer-kernels", "deepinfer-protocol", "deepinfer-serving"]),
    ("deepinfer-transport", &["deepinfer-protocol"]),
    ("deepinfer-gateway", &["deepinfer-protocol", "deepinfer-serving", "deepinfer-transport"]),
    (
        "deepinfer-agent",
        &[
            "deepinfer-engine",
            "deepinfer-kernels",
            "deepinfer-protocol",
            "deepinfer-serving",
            "deepinfer-transport",
        ],
    ),
    (
        "deepinfer",
        &[
            "deepinfer-agent",
            "deepinfer-crds",
            "deepinfer-engine",
            "deepinfer-gateway",
            "deepinfer-kernels",
            "deepinfer-planner",
            "deepinfer-protocol",
            "deepinfer-serving",
            "deepinfer-transport",
        ],
    ),
    (
        "deepinfer-operator",
        &["deepinfer-crds", "deepinfer-planner", "deepinfer-protocol", "deepinfer-transport"],
    ),
    ("kubectl-deepinfer", &["deepinfer-crds", "deepinfer-planner", "deepinfer-protocol"]),
    ("deepinfer-controlplane", &["deepinfer-crds", "deepinfer-protocol", "deepinfer-transport"]),
    ("deepinfer-e2e", &[]),
];

/// Crates from outside that a core crate must not see.
const FORBIDDEN: &[(&str, &[&str])] = &[
    ("deepinfer-kernels", &["tokio", "serde", "serde_json"]),
    ("deepinfer-protocol", &["tokio", "kube"]),
    ("deepinfer-crds", &["tokio", "kube-client"]),
    ("deepinfer-serving", &["tokio", "kube"]),
    ("deepinfer-planner", &["tokio", "kube-client"]),
    ("deepinfer-engine", &["tokio", "kube"]),
    ("deepinfer-gateway", &["kube"]),
    ("deepinfer-agent", &["kube"]),
];

/// Checks the arrows of `cargo metadata --no-deps`.
///
/// # Errors
/// If the metadata does not have the fields that cargo documents.
pub fn arrows(metadata: &serde_json::Value) -> Result<Vec<Finding>, String> {
    let packages = metadata["packages"].as_array().ok_or("metadata has no packages")?;
    let ours: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().ok_or("a package without a name")?;
        let Some((_, allowed)) = ALLOWED_ARROWS.iter().find(|(n, _)| *n == name) else {
            findings
                .push(finding(name, "is not in the table of arrows: add it there and to ARCHITECTURE.md"));
            continue;
        };
        let forbidden = FORBIDDEN.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, f)| f);
        for dependency in package["dependencies"].as_array().ok_or("a package without dependencies")? {
            let target = dependency["name"].as_str().ok_or("a dependency without a name")?;
            let shipped = dependency["kind"].is_null();
            if shipped && ours.contains(&target) && !allowed.contains(&target) {
                findings.push(finding(name, &format!("imports {target}, an arrow that does not exist")));
            }
            if shipped && forbidden.contains(&target) {
                findings.push(finding(name, &format!("imports {target}, which it may not see")));
            }
        }
    }
    Ok(findings)
}

fn finding(place: &str, message: &str) -> Finding {
    Finding { place: place.to_owned(), line: 0, message: message.to_owned() }
}
