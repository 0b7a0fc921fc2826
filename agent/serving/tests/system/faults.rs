//! What can go wrong, as methods of the world: processes that die, connections that break, engines that are lost,
//! drains, and operators that name other leaders.

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::Leader;
use deepinfer_protocol::{Epoch, Span};
use deepinfer_serving::node::NodeEvent;

use crate::client::Ending;
use crate::world::{Due, Process, World};

impl World {
    /// The process dies with everything in it.
    pub fn crash(&mut self, process: usize, back_after: Span) {
        if matches!(self.processes[process], Process::Dead) {
            return;
        }
        self.processes[process] = Process::Dead;
        self.heard_up.retain(|(who, _)| *who != process);
        for peer in 0..self.names.len() {
            self.cut(process, peer, Span::secs(60));
        }
        let restart = self.now + back_after;
        self.push(restart, Due::Restart { process });
    }

    /// A gateway dies and does not come back: its clients see closed connections.
    pub fn crash_for_good(&mut self, gateway: usize) {
        self.crash_gateway(gateway, Span::secs(1_000_000));
    }

    /// A gateway dies with all its requests: its clients see closed connections.
    pub fn crash_gateway(&mut self, gateway: usize, back_after: Span) {
        self.crash(gateway, back_after);
        for (id, asked) in &mut self.clients.asked {
            if (id.0 >> 64) as usize == gateway + 1 && asked.ending.is_none() {
                asked.ending = Some(Ending::Lost);
            }
        }
    }

    /// Breaks the connection of two processes; it comes back after both have noticed.
    pub fn cut(&mut self, a: usize, b: usize, back_after: Span) {
        if a == b || !self.net.is_up(a, b) {
            return;
        }
        self.net.cut(a, b);
        let mut latest = self.now;
        for (process, peer) in [(a, b), (b, a)] {
            let at = self.now + Span::millis(self.dice.below(750) as u64);
            latest = latest.max(at);
            self.push(at, Due::Lost { process, peer });
        }
        self.push(latest + back_after, Due::Connect { a, b });
    }

    /// The engine of a machine breaks; another one is there after a while.
    pub fn break_engine(&mut self, process: usize, machine: usize) {
        let Process::Agent(agent) = &mut self.processes[process] else { return };
        agent.engines[machine].lose();
        let engine = self.engines.entry((process, machine)).or_default();
        *engine += 1;
        let engine = *engine;
        self.push(self.now, Due::Engine { process, machine, engine });
        self.push(self.now + Span::millis(300), Due::Ready { process, machine, engine });
    }

    /// Drains an agent, which is undrained or restarted later.
    pub fn drain(&mut self, process: usize, deadline: Span, restart: bool) {
        let name = self.names[process].clone();
        self.change_fleet(|f| {
            f.members.iter_mut().filter(|m| m.name == name).for_each(|m| m.serving = false)
        });
        let at = self.now + deadline;
        self.nodes(process, &NodeEvent::Drain { deadline: at });
        let due = if restart { Due::Drained { process } } else { Due::Undrain { process } };
        let after = if restart { Span::secs(2) } else { Span::ZERO };
        self.push(at + after, due);
    }

    /// Names another leader, as an operator does after it has not heard of the old one.
    pub fn name_leader(&mut self, role: Role, after: usize) {
        let candidates: Vec<usize> = (0..self.names.len())
            .filter(|p| self.roles[*p] == Some(role) && !matches!(self.processes[*p], Process::Dead))
            .collect();
        let Some(process) = candidates.get(after % candidates.len().max(1)) else { return };
        let agent = self.names[*process].clone();
        self.change_fleet(|f| {
            let leader = match role {
                Role::Prefill => &mut f.prefill_leader,
                Role::Decode => &mut f.decode_leader,
            };
            let epoch = leader.as_ref().map_or(Epoch(1), |l| l.epoch.next());
            *leader = Some(Leader { agent, epoch });
        });
    }
}
