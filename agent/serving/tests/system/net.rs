//! Connections in memory: messages of one connection keep their order, those of different ones do not; a broken
//! connection loses what was under way, and both ends hear of it some time later.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::message::Message;
use deepinfer_protocol::{Span, Time};

use crate::dice::Dice;

/// A message under way.
#[derive(Clone, Debug)]
pub struct Letter {
    pub from: usize,
    pub to: usize,
    pub message: Message,
    pub payload: Arc<[u8]>,
    /// Of the connection that it was sent on.
    connection: u64,
}

#[derive(Default)]
struct Link {
    connection: u64,
    up: bool,
    /// Latest arrival of each direction.
    last: [Time; 2],
}

/// All connections, by the indices of the processes.
#[derive(Default)]
pub struct Net {
    links: BTreeMap<(usize, usize), Link>,
    /// Longest way of a message.
    pub slowest: Span,
    /// One message in so many comes twice, one piece in so many comes damaged; 0 for none.
    pub twice: usize,
    pub damaged: usize,
}

impl Net {
    /// No connections; messages take up to `slowest`.
    pub fn new(slowest: Span) -> Self {
        Self { slowest, ..Self::default() }
    }

    fn link(&mut self, a: usize, b: usize) -> &mut Link {
        self.links.entry((a.min(b), a.max(b))).or_default()
    }

    /// Whether the two are connected.
    pub fn is_up(&mut self, a: usize, b: usize) -> bool {
        a == b || self.link(a, b).up
    }

    /// A new connection.
    pub fn connect(&mut self, a: usize, b: usize) {
        let link = self.link(a, b);
        link.up = true;
        link.connection += 1;
    }

    /// What is under way is lost.
    pub fn cut(&mut self, a: usize, b: usize) {
        let link = self.link(a, b);
        link.up = false;
        link.connection += 1;
    }

    /// Sends; gives the letter (once or twice) and when it arrives, or nothing if there is no connection.
    pub fn send(
        &mut self,
        now: Time,
        dice: &mut Dice,
        (from, to): (usize, usize),
        message: Message,
        payload: Arc<[u8]>,
    ) -> Vec<(Time, Letter)> {
        let way = Span(dice.below(self.slowest.0 as usize + 1) as u64);
        let payload = if !payload.is_empty() && self.damaged > 0 && dice.one_in(self.damaged) {
            let mut bytes = payload.to_vec();
            let at = dice.below(bytes.len());
            bytes[at] ^= 1;
            bytes.into()
        } else {
            payload
        };
        let copies = if self.twice > 0 && dice.one_in(self.twice) { 2 } else { 1 };
        let link = self.link(from, to);
        if from != to && !link.up {
            return Vec::new();
        }
        let last = &mut link.last[usize::from(from > to)];
        *last = (*last).max(now + way);
        let letter = Letter { from, to, message, payload, connection: link.connection };
        vec![(*last, letter); copies]
    }

    /// Whether a letter still arrives: its connection has not been cut since.
    pub fn arrives(&mut self, letter: &Letter) -> bool {
        let (from, to) = (letter.from, letter.to);
        from == to || {
            let link = self.link(from, to);
            link.up && link.connection == letter.connection
        }
    }
}
