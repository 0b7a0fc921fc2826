//! Looking at the world from outside, for assertions.

use deepinfer_serving::gateway::GatewayStats;

use crate::world::{Process, World};

impl World {
    /// Counters of the gateways.
    pub fn stats(&self) -> Vec<GatewayStats> {
        let stats = |p: &Process| match p {
            Process::Gateway(gateway) => Some(gateway.stats()),
            _ => None,
        };
        self.processes.iter().filter_map(stats).collect()
    }

    /// Everything that is still held anywhere, in words.
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        for (process, name) in self.processes.iter().zip(&self.names) {
            match process {
                Process::Gateway(gateway) if gateway.holds() > 0 => {
                    left.push(format!("{name}: {:?}", gateway.stats()));
                }
                Process::Agent(agent) => left.extend(agent.leftovers()),
                _ => {}
            }
        }
        left
    }
}
