//! Words that many objects say, kept once: keys of labels are the same on all nodes, and most values are.

use std::collections::HashSet;
use std::sync::Arc;

use deepinfer_planner::Labels;

/// Words below which nobody looks for those that are not said any more.
const FEW: usize = 4096;

/// All words that are shared.
#[derive(Debug, Default)]
pub struct Words {
    known: HashSet<Arc<str>>,
    /// How many there were after the last sweep.
    kept: usize,
}

impl Words {
    /// The same labels in shared words.
    pub fn share(&mut self, labels: &Labels) -> Labels {
        if self.known.len() > FEW.max(2 * self.kept) {
            self.known.retain(|word| Arc::strong_count(word) > 1);
            self.kept = self.known.len();
        }
        labels.iter().map(|(key, value)| (self.one(key), self.one(value))).collect()
    }

    fn one(&mut self, word: &Arc<str>) -> Arc<str> {
        if let Some(known) = self.known.get(word) {
            return Arc::clone(known);
        }
        self.known.insert(Arc::clone(word));
        Arc::clone(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_many_nodes_share_their_words_and_those_of_gone_nodes_are_forgotten() {
        let mut words = Words::default();
        let node =
            |name: String| -> Labels { [("zone", "a".to_owned()), ("hostname", name)].into_iter().collect() };
        let one = words.share(&node("n1".to_owned()));
        let two = words.share(&node("n2".to_owned()));
        assert_eq!((two.get("zone"), two.get("hostname")), (Some("a"), Some("n2")));
        let place = |labels: &Labels| labels.get("zone").map(str::as_ptr);
        assert_eq!(place(&one), place(&two));
        for at in 0..3 * FEW {
            words.share(&node(format!("gone-{at}")));
        }
        assert!(words.known.len() <= FEW + 2, "{}", words.known.len());
        assert!(words.known.contains("n1"));
    }
}
