//! Addresses for pods: a network namespace for each, on one bridge, or a loopback address.
//!
//! With root, a pod has an address of its own in a /16 that two runs on one machine never share. The host reaches a pod
//! by that address; a pod reaches the host at [`Network::host_address`]. No route leaves the bridge: the range is also
//! `unreachable` on the host, and a namespace has no default route. Without root a pod gets an address of 127.0.0.0/8
//! and hears of it by `DEEPINFER_BIND_ADDRESS`.

mod ip;
mod ledger;

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use anyhow::{Context as _, bail};

use self::ip::{batch, batch_in, claim_range};
pub(crate) use self::ledger::clean_up_after_the_dead;
use self::ledger::{Ledger, unmake};

/// The variable that tells a process without a namespace which address is its own.
pub const BIND_ADDRESS: &str = "DEEPINFER_BIND_ADDRESS";

/// Where pods get their addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkKind {
    /// Namespaces if this process may make them, else loopback, and it is said which.
    #[default]
    Auto,
    /// A network namespace for each pod; an error if that is not allowed.
    Namespaces,
    /// An address of 127.0.0.0/8 for each pod.
    Loopback,
}

/// The network of one set of process nodes. Dropping it removes it.
#[derive(Debug)]
pub struct Network {
    /// The second byte of the range, `10.N.0.0/16` or `127.N.0.0/16`.
    range: u8,
    next: AtomicU16,
    ledger: Option<Ledger>,
    removed: AtomicBool,
}

/// The address of one pod, and its namespace if it has one.
#[derive(Clone, Debug)]
pub struct PodNetwork {
    /// The pod's own address.
    pub address: Ipv4Addr,
    /// The name of its network namespace.
    pub namespace: Option<String>,
    number: u16,
}

impl Network {
    /// Makes the bridge, or settles for loopback. `root` is the folder of this run, where its names are written down
    /// before they are used, so that whoever cleans up later finds them.
    ///
    /// # Errors
    /// If namespaces are demanded and cannot be made.
    pub fn start(kind: NetworkKind, root: &Path) -> anyhow::Result<Network> {
        let spaced = match kind {
            NetworkKind::Loopback => return Network::loopback(),
            NetworkKind::Namespaces | NetworkKind::Auto => Network::bridged(root),
        };
        match spaced {
            Err(error) if kind == NetworkKind::Auto => {
                eprintln!("pods get loopback addresses, since network namespaces cannot be made: {error:#}");
                Network::loopback()
            }
            other => other,
        }
    }

    fn loopback() -> anyhow::Result<Network> {
        let mut byte = [0];
        getrandom::fill(&mut byte)?;
        Ok(Network {
            range: 64 + byte[0] % 128,
            next: AtomicU16::new(2),
            ledger: None,
            removed: AtomicBool::new(false),
        })
    }

    fn bridged(root: &Path) -> anyhow::Result<Network> {
        let mut id = [0; 3];
        getrandom::fill(&mut id)?;
        let id = id.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string takes everything");
            text
        });
        let range = claim_range()?;
        let ledger = Ledger { id, range };
        let made = ledger.write(root).map_err(anyhow::Error::from).and_then(|()| {
            batch(&format!(
                "link add {bridge} type bridge\naddr add 10.{range}.0.1/16 dev {bridge}\nlink set {bridge} up\n",
                bridge = ledger.bridge()
            ))
        });
        if let Err(error) = made {
            unmake(&ledger);
            return Err(error.context("cannot make a bridge"));
        }
        Ok(Network { range, next: AtomicU16::new(2), ledger: Some(ledger), removed: AtomicBool::new(false) })
    }

    /// Whether pods have namespaces of their own.
    pub fn has_namespaces(&self) -> bool {
        self.ledger.is_some()
    }

    /// Where pods reach servers of the host (that listen on this address or on all).
    pub fn host_address(&self) -> Ipv4Addr {
        match self.ledger {
            Some(_) => Ipv4Addr::new(10, self.range, 0, 1),
            None => Ipv4Addr::LOCALHOST,
        }
    }

    /// Gives a pod an address of its own. Addresses are not used twice before all have been used.
    ///
    /// # Errors
    /// If the namespace cannot be made.
    pub async fn attach(&self, hosts: &[(String, IpAddr)]) -> anyhow::Result<PodNetwork> {
        let number = self.next.fetch_add(1, Ordering::Relaxed).max(2);
        let [high, low] = number.to_be_bytes();
        let Some(ledger) = self.ledger.clone() else {
            let address = Ipv4Addr::new(127, self.range, high, low.max(1));
            return Ok(PodNetwork { address, namespace: None, number });
        };
        let address = Ipv4Addr::new(10, self.range, high, low);
        let space = ledger.namespace(number);
        let hosts = hosts.to_vec();
        let work = move || -> anyhow::Result<()> {
            write_names(&space, &hosts)?;
            batch(&format!(
                "netns add {space}\nlink add {port} type veth peer name eth0 netns {space}\n\
                 link set {port} master {bridge} up\n",
                port = ledger.port(number),
                bridge = ledger.bridge(),
            ))?;
            batch_in(&space, &format!("addr add {address}/16 dev eth0\nlink set eth0 up\nlink set lo up\n"))
        };
        tokio::task::spawn_blocking(work)
            .await?
            .with_context(|| format!("no network for a pod at {address}"))?;
        let namespace = self.ledger.as_ref().map(|l| l.namespace(number));
        Ok(PodNetwork { address, namespace, number })
    }

    /// Takes the address of a pod away. Whatever still runs in its namespace is killed.
    pub async fn detach(&self, pod: &PodNetwork) {
        let (Some(ledger), number) = (self.ledger.clone(), pod.number) else { return };
        let work = move || ledger::unmake_namespace(&ledger.namespace(number), Some(&ledger.port(number)));
        tokio::task::spawn_blocking(work).await.ok();
    }

    /// Cuts or mends the cable of a pod: nothing reaches it, nothing is answered, no connection is reset.
    ///
    /// # Errors
    /// Without namespaces there is no cable.
    pub fn set_cable(&self, pod: &PodNetwork, up: bool) -> anyhow::Result<()> {
        let Some(ledger) = &self.ledger else {
            bail!("pods with loopback addresses have no cable: run the test as root");
        };
        batch(&format!("link set {} {}\n", ledger.port(pod.number), if up { "up" } else { "down" }))
    }
}

impl Network {
    /// Removes everything. Doing it again is fine.
    pub(crate) fn remove(&self) {
        if let Some(ledger) = &self.ledger
            && !self.removed.swap(true, Ordering::Relaxed)
        {
            unmake(ledger);
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Names for programs in a namespace: `ip netns exec` lays these files over /etc. No name server is asked, since none
/// can be reached.
fn write_names(namespace: &str, hosts: &[(String, IpAddr)]) -> io::Result<()> {
    let folder = PathBuf::from("/etc/netns").join(namespace);
    fs::create_dir_all(&folder)?;
    let mut text = "127.0.0.1 localhost\n".to_owned();
    for (name, address) in hosts {
        writeln!(text, "{address} {name}").expect("a string takes everything");
    }
    fs::write(folder.join("hosts"), text)?;
    fs::write(folder.join("resolv.conf"), "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn loopback_pods_get_different_addresses() {
        let network = Network::start(NetworkKind::Loopback, Path::new("/nowhere")).unwrap();
        let (one, two) = (network.attach(&[]).await.unwrap(), network.attach(&[]).await.unwrap());
        assert!(one.address.is_loopback() && one.address != two.address);
        assert!(network.set_cable(&one, false).is_err());
    }

    #[tokio::test]
    async fn pods_of_a_bridge_reach_each_other_and_leave_nothing_behind() {
        let root = tempfile::tempdir().unwrap();
        let network = match Network::start(NetworkKind::Namespaces, root.path()) {
            Ok(network) => network,
            Err(error) => return eprintln!("skipped: network namespaces need root: {error:#}"),
        };
        let pod = network.attach(&[("somewhere".into(), network.host_address().into())]).await.unwrap();
        let space = pod.namespace.clone().unwrap();
        let names = std::process::Command::new("ip")
            .args(["netns", "exec", &space, "cat", "/etc/hosts", "/proc/net/route"])
            .output()
            .unwrap();
        let text = String::from_utf8(names.stdout).unwrap();
        assert!(text.contains("somewhere"), "{text}");
        let default = |line: &str| line.split_whitespace().nth(1) == Some("00000000");
        assert!(!text.lines().any(default), "no default route: {text}");
        // The host has the bridge's address, so it can listen there for its pods.
        std::net::TcpListener::bind((network.host_address(), 0)).unwrap();
        network.set_cable(&pod, false).unwrap();
        network.set_cable(&pod, true).unwrap();
        let bridge = network.ledger.as_ref().unwrap().bridge();
        drop(network);
        let left = std::process::Command::new("ip").args(["link", "show", &bridge]).output().unwrap();
        assert!(!left.status.success());
        assert!(!Path::new("/run/netns").join(&space).exists());
        assert!(!Path::new("/etc/netns").join(&space).exists());
    }
}
