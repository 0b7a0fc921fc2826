//! What a run has made, by name, and taking it away: at its end, or after a run that was killed.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::ip::{batch, release_range};

/// The file in a run's folder that says which names it uses.
const FILE: &str = "network.json";

/// The names of one run's bridge, ports and namespaces.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ledger {
    pub id: String,
    pub range: u8,
}

impl Ledger {
    pub(super) fn bridge(&self) -> String {
        format!("dib{}", self.id)
    }

    pub(super) fn port(&self, number: u16) -> String {
        format!("di{}p{number}", self.id)
    }

    pub(super) fn namespace(&self, number: u16) -> String {
        format!("{}{number}", self.prefix())
    }

    fn prefix(&self) -> String {
        format!("deepinfer-{}-", self.id)
    }

    pub(super) fn write(&self, root: &Path) -> io::Result<()> {
        fs::write(root.join(FILE), serde_json::to_vec(self)?)
    }
}

/// Removes what the run of this folder left, if it was killed. The folder itself stays.
pub(crate) fn clean_up_after_the_dead(root: &Path) {
    let ledger = fs::read(root.join(FILE)).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(ledger) = ledger {
        unmake(&ledger);
    }
}

/// Removes everything of a ledger; what is not there is fine.
pub(super) fn unmake(ledger: &Ledger) {
    let prefix = ledger.prefix();
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&prefix) {
            unmake_namespace(&name, None);
        }
    }
    batch(&format!("link del {}\n", ledger.bridge())).ok();
    release_range(ledger.range);
}

/// Kills what runs in a namespace and removes it, with its cable.
pub(super) fn unmake_namespace(namespace: &str, port: Option<&str>) {
    if let Ok(output) = Command::new("ip").args(["netns", "pids", namespace]).output() {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let pids: Vec<_> = text.split_whitespace().collect();
        if !pids.is_empty() {
            // Those that ended meanwhile are no longer there to kill.
            Command::new("kill").arg("-KILL").args(pids).output().ok();
        }
    }
    // The namespace would keep its end of the cable until the last process is gone; this end takes both at once.
    if let Some(port) = port {
        batch(&format!("link del {port}\n")).ok();
    }
    batch(&format!("netns del {namespace}\n")).ok();
    fs::remove_dir_all(Path::new("/etc/netns").join(namespace)).ok();
}
