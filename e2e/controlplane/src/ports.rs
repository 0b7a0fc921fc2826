//! Free ports on loopback.

use std::collections::BTreeSet;
use std::net::TcpListener;

use anyhow::bail;

/// Free ports below the range that the system gives to outgoing connections: what is free now stays free unless
/// another test bed picks the same.
///
/// # Errors
/// If there are not as many.
pub fn free_ports(count: usize) -> anyhow::Result<Vec<u16>> {
    // Held until all are found, so that they differ.
    let mut held = Vec::with_capacity(count);
    let mut tried = BTreeSet::new();
    while held.len() < count && tried.len() < 2000 {
        let mut bytes = [0u8; 2];
        getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("no random numbers from the system: {e}"))?;
        let port = 20_000 + u16::from_le_bytes(bytes) % 12_000;
        if tried.insert(port)
            && let Ok(listener) = TcpListener::bind(("127.0.0.1", port))
        {
            held.push(listener);
        }
    }
    if held.len() < count {
        bail!("no {count} free ports on 127.0.0.1 between 20000 and 32000");
    }
    let ports: Result<Vec<u16>, _> = held.iter().map(|l| l.local_addr().map(|a| a.port())).collect();
    Ok(ports?)
}
