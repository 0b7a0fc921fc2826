//! Profiles: the ones that come with the operator, and what a node's labels say under one (operator.md 6.1.1-6.1.3).

use std::collections::BTreeMap;

use deepinfer_crds::cluster::Vendor;

use super::{Placement, Profile};
use crate::nodes::{Labels, Nodes};

/// Accelerators of a compute tray of a multi-node NVLink rack.
const TRAY: u32 = 4;

/// What one cannot know before the nodes are there: labels may have at most this many bytes after the slash.
const LABEL_NAME_MAX: usize = 63;

impl Profile {
    /// Those of a release, by name: nvl72, nvl-generic, hgx, superpod, none.
    pub fn built_in() -> BTreeMap<String, Self> {
        let nvlink = Self {
            domain_labels: words(&["nvidia.com/gpu.clique", "deepinfer.io/nvlink-domain"]),
            block_labels: words(&["topology.kubernetes.io/rack", "topology.kubernetes.io/zone"]),
            compute_domain: true,
            volcano_tier: 1,
            ..Self::default()
        };
        let hgx = Self {
            domain_labels: words(&["kubernetes.io/hostname"]),
            block_labels: nvlink.block_labels.clone(),
            ..Self::default()
        };
        let superpod = Self {
            domain_labels: words(&["deepinfer.io/ascend-superpod"]),
            block_labels: words(&["deepinfer.io/ascend-rack"]),
            host_mounts: words(&["/usr/local/Ascend/driver", "/etc/hccn.conf"]),
            volcano_tier: 1,
            super_pod: true,
            ..Self::default()
        };
        let none = Self { shared_nodes: true, ..Self::default() };
        [
            ("nvl72", nvlink.clone()),
            ("nvl-generic", nvlink),
            ("hgx", hgx),
            ("superpod", superpod),
            ("none", none),
        ]
        .map(|(name, profile)| (name.to_owned(), profile))
        .into()
    }

    /// Name of the profile of a cluster that names none.
    pub fn default_name(vendor: Vendor, accelerators_per_node: u32) -> &'static str {
        match vendor {
            Vendor::Nvidia if accelerators_per_node <= TRAY => "nvl72",
            Vendor::Nvidia => "hgx",
            Vendor::Ascend => "superpod",
            Vendor::Cpu => "none",
        }
    }

    /// Whether it makes sense.
    ///
    /// # Errors
    /// What does not, with the fix.
    pub fn check(&self) -> Result<(), String> {
        for label in self.domain_labels.iter().chain(&self.block_labels) {
            let name = label.rsplit('/').next().unwrap_or_default();
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if name.is_empty() || name.len() > LABEL_NAME_MAX || !name.chars().all(fits) {
                return Err(format!("{label:?} is not the key of a label: write it as prefix/name"));
            }
        }
        if self.shared_nodes && !self.domain_labels.is_empty() {
            return Err(
                "sharedNodes makes all nodes one domain: remove domainLabels or sharedNodes".to_owned()
            );
        }
        if self.compute_domain && self.domain_labels.is_empty() {
            return Err(
                "computeDomain needs domainLabels: a ComputeDomain stays inside one NVLink domain".to_owned()
            );
        }
        if self.compute_domain && self.allow_cross_domain {
            return Err(
                "computeDomain and allowCrossDomain exclude each other: NVLink memory ends at the domain"
                    .to_owned(),
            );
        }
        if let Some(path) = self.host_mounts.iter().find(|path| !path.starts_with('/')) {
            return Err(format!("hostMounts: {path:?} is not an absolute path"));
        }
        Ok(())
    }

    /// Whether pods of a supernode are to share a fabric domain that a label names.
    pub fn has_domains(&self) -> bool {
        !self.shared_nodes && !self.allow_cross_domain && !self.domain_labels.is_empty()
    }
}

/// The domain that labels name: by the first label that has a value.
pub fn domain_of(profile: &Profile, labels: &Labels) -> Option<Placement> {
    let (label, domain) = label_of(profile, labels)?;
    Some(Placement { label: label.to_owned(), domain: domain.to_owned() })
}

/// The same without copies.
pub(super) fn label_of<'a>(profile: &'a Profile, labels: &'a Labels) -> Option<(&'a str, &'a str)> {
    let present = profile.domain_labels.iter().filter_map(|label| Some((label, labels.get(label)?)));
    let mut present = present.filter(|(_, value)| !value.is_empty());
    present.next().map(|(label, value)| (label.as_str(), value))
}

/// For schedulers that choose the domain: the label that most nodes go by, and no value. `None` without domains.
pub fn free_choice(nodes: &Nodes, profile: &Profile) -> Option<Placement> {
    if !profile.has_domains() {
        return None;
    }
    let mut counts: Vec<(usize, &String)> = profile.domain_labels.iter().map(|label| (0, label)).collect();
    for node in nodes.by_name.values() {
        let found = label_of(profile, &node.labels).map(|(label, _)| label);
        if let Some((count, _)) = counts.iter_mut().find(|(_, label)| found == Some(label.as_str())) {
            *count += 1;
        }
    }
    // The first of the most common: labels are named in the order of trust.
    let most = counts.iter().map(|(count, _)| *count).max()?;
    let (_, label) = counts.into_iter().find(|(count, _)| *count == most)?;
    Some(Placement { label: label.clone(), domain: String::new() })
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::NodeFacts;

    #[test]
    fn built_in_profiles_are_sound_and_the_defaults_exist() {
        let all = Profile::built_in();
        for (name, profile) in &all {
            assert_eq!(profile.check(), Ok(()), "{name}");
        }
        for vendor in [Vendor::Nvidia, Vendor::Ascend, Vendor::Cpu] {
            for per_node in [1, 4, 8, 16] {
                assert!(all.contains_key(Profile::default_name(vendor, per_node)), "{vendor:?} {per_node}");
            }
        }
    }

    #[test]
    fn the_first_label_with_a_value_names_the_domain() {
        let profile = &Profile::built_in()["nvl72"];
        let labels = |pairs: &[(&str, &str)]| -> Labels { pairs.iter().copied().collect() };
        let own = ("deepinfer.io/nvlink-domain", "b");
        let domain = |labels| domain_of(profile, &labels).map(|placement| placement.domain);
        assert_eq!(domain(labels(&[("nvidia.com/gpu.clique", "a"), own])), Some("a".to_owned()));
        assert_eq!(domain(labels(&[("nvidia.com/gpu.clique", ""), own])), Some("b".to_owned()));
        assert_eq!(domain(labels(&[])), None);
    }

    /// OP-083: the label of another source stands in for the one that feature discovery wrote.
    #[test]
    fn schedulers_are_given_the_label_that_most_nodes_go_by() {
        let profile = &Profile::built_in()["nvl72"];
        let mut nodes = Nodes::default();
        for (name, label) in [("n1", 1), ("n2", 1), ("n3", 0)] {
            let labels = [(profile.domain_labels[label].as_str(), "a")].into_iter().collect();
            nodes.insert(NodeFacts { name: name.to_owned(), labels, ..NodeFacts::default() });
        }
        let choice = free_choice(&nodes, profile).expect("there are domains");
        assert_eq!((choice.label.as_str(), choice.domain.as_str()), ("deepinfer.io/nvlink-domain", ""));
        let choice = free_choice(&Nodes::default(), profile).expect("there are domains");
        assert_eq!(choice.label, "nvidia.com/gpu.clique");
        assert_eq!(free_choice(&nodes, &Profile::built_in()["none"]), None);
    }

    #[test]
    fn a_profile_that_contradicts_itself_is_refused_with_the_fix() {
        let nvl = Profile::built_in()["nvl72"].clone();
        let refused = |profile: Profile| profile.check().expect_err("refused");
        assert!(refused(Profile { shared_nodes: true, ..nvl.clone() }).contains("sharedNodes"));
        assert!(refused(Profile { allow_cross_domain: true, ..nvl.clone() }).contains("allowCrossDomain"));
        assert!(refused(Profile { domain_labels: Vec::new(), ..nvl.clone() }).contains("domainLabels"));
        assert!(refused(Profile { block_labels: words(&["rack "]), ..nvl.clone() }).contains("rack"));
        assert!(refused(Profile { host_mounts: words(&["etc"]), ..nvl }).contains("absolute"));
    }
}
