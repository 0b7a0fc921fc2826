//! Which expert lies in which slot of which rank, by layer.
//!
//! Invariant: every expert of every layer has at least one slot, so each pick has somewhere to go.

use thiserror::Error;

use crate::shape::ModelShape;

/// Most ranks of a supernode: 128 accelerators in one fabric domain are the largest that is built.
const MAX_RANKS: usize = 128;
/// Knuth's multiplicative hash, for the choice among replicas (EB-11).
const HASH: u32 = 2_654_435_769;

/// Why experts cannot be laid out so.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SlotMapError {
    /// No rank, or too many.
    #[error("ranks is {ranks}, expected 1 to {MAX_RANKS}")]
    Ranks {
        /// Ranks asked for.
        ranks: usize,
    },
    /// More slots than there are experts.
    #[error("extraSlotsPerRank is {extra}, at most {max}: a rank would hold some expert twice")]
    ExtraSlots {
        /// Extra slots asked for.
        extra: usize,
        /// The most that make sense.
        max: usize,
    },
    /// A layer's list has another length, or an id that does not exist.
    #[error("layer {layer}: {detail}")]
    Layer {
        /// The layer.
        layer: usize,
        /// What is wrong.
        detail: String,
    },
}

/// Slot -> expert of every backbone layer, and back. Physical slot `p` is local slot `p % slots_per_rank` of
/// rank `p / slots_per_rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotMap {
    ranks: usize,
    slots_per_rank: usize,
    experts: usize,
    layers: Vec<LayerMap>,
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerMap {
    /// Expert of each physical slot.
    experts: Vec<u32>,
    /// Physical slots by expert, ascending.
    places: Vec<u32>,
    /// End of each expert's part of `places`.
    ends: Vec<u32>,
}

impl SlotMap {
    /// The layout of a new supernode: experts in order, then expert 0, 1, .. again in the extra slots. A rank
    /// has `ceil(experts / ranks) + extra_slots` slots; a rank alone has no extra ones, whatever is asked for.
    ///
    /// # Errors
    /// [`SlotMapError::Ranks`], [`SlotMapError::ExtraSlots`].
    pub fn initial(shape: &ModelShape, ranks: usize, extra_slots: usize) -> Result<Self, SlotMapError> {
        let experts = shape.n_routed_experts;
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(SlotMapError::Ranks { ranks });
        }
        let extra = if ranks == 1 { 0 } else { extra_slots };
        let share = experts.div_ceil(ranks);
        let max = experts - share;
        if extra > max {
            return Err(SlotMapError::ExtraSlots { extra, max });
        }
        let layer: Vec<u32> = (0..ranks * (share + extra)).map(|p| (p % experts) as u32).collect();
        Self::new(experts, ranks, vec![layer; shape.num_hidden_layers])
    }

    /// Any layout: `layers[layer][physical slot]` is an expert. All layers have the same number of slots, a
    /// multiple of `ranks`.
    ///
    /// # Errors
    /// [`SlotMapError::Ranks`], [`SlotMapError::Layer`].
    pub fn new(experts: usize, ranks: usize, layers: Vec<Vec<u32>>) -> Result<Self, SlotMapError> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(SlotMapError::Ranks { ranks });
        }
        let slots = layers.first().map_or(0, Vec::len);
        let layers = layers.into_iter().enumerate().map(|(layer, list)| {
            let detail = if list.len() != slots || !slots.is_multiple_of(ranks) {
                format!("{} slots, expected {slots} as in layer 0, a multiple of {ranks}", list.len())
            } else if let Some(expert) = list.iter().find(|&&e| e as usize >= experts) {
                format!("expert {expert}, the model has {experts}")
            } else {
                let map = LayerMap::of(list, experts);
                match map.unplaced() {
                    None => return Ok(map),
                    Some(expert) => format!("expert {expert} has no slot"),
                }
            };
            Err(SlotMapError::Layer { layer, detail })
        });
        let layers = layers.collect::<Result<_, _>>()?;
        Ok(Self { ranks, slots_per_rank: slots / ranks, experts, layers })
    }

    /// Ranks of the supernode.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Slots of one rank in one layer.
    pub fn slots_per_rank(&self) -> usize {
        self.slots_per_rank
    }

    /// Logical experts of a layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Backbone layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Logical expert of each local slot of a rank.
    ///
    /// # Panics
    /// If there is no such layer or rank.
    pub fn local(&self, layer: usize, rank: usize) -> &[u32] {
        &self.layers[layer].experts[rank * self.slots_per_rank..(rank + 1) * self.slots_per_rank]
    }

    /// Where the token with this index in the step finds an expert: rank and local slot. Replicas take turns
    /// by a hash of the index.
    pub(crate) fn choose(&self, layer: usize, expert: u32, token: u32) -> (u32, u32) {
        let replicas = self.layers[layer].replicas(expert);
        // The low bits of the product are those of the token; the high ones are mixed.
        let hash = token.wrapping_mul(HASH) >> 16;
        let place = replicas[hash as usize % replicas.len()] as usize;
        ((place / self.slots_per_rank) as u32, (place % self.slots_per_rank) as u32)
    }
}

impl LayerMap {
    fn of(experts: Vec<u32>, count: usize) -> Self {
        let mut places: Vec<u32> = (0..experts.len() as u32).collect();
        places.sort_by_key(|&place| (experts[place as usize], place));
        let mut ends = vec![0u32; count];
        for &expert in &experts {
            ends[expert as usize] += 1;
        }
        let mut end = 0;
        for ends in &mut ends {
            end += *ends;
            *ends = end;
        }
        Self { experts, places, ends }
    }

    fn replicas(&self, expert: u32) -> &[u32] {
        let expert = expert as usize;
        let begin = if expert == 0 { 0 } else { self.ends[expert - 1] };
        &self.places[begin as usize..self.ends[expert] as usize]
    }

    fn unplaced(&self) -> Option<usize> {
        (0..self.ends.len()).find(|&e| self.replicas(e as u32).is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(experts: usize, ranks: usize, slots: &[u32]) -> Result<SlotMap, SlotMapError> {
        SlotMap::new(experts, ranks, vec![slots.to_vec(); 2])
    }

    #[test]
    fn every_replica_is_chosen_and_tokens_without_a_choice_go_to_the_only_one() {
        let map = map(3, 2, &[0, 1, 2, 0]).unwrap();
        assert_eq!((map.local(1, 0), map.local(1, 1)), (&[0, 1][..], &[2, 0][..]));
        let mut turns = [0; 2];
        for token in 0..1000 {
            assert_eq!(map.choose(0, 1, token), (0, 1));
            assert_eq!(map.choose(0, 2, token), (1, 0));
            match map.choose(0, 0, token) {
                (0, 0) => turns[0] += 1,
                (1, 1) => turns[1] += 1,
                other => panic!("expert 0 is not at {other:?}"),
            }
        }
        assert!(turns.iter().all(|n| (400..600).contains(n)), "{turns:?}");
    }

    #[test]
    fn a_layout_that_loses_an_expert_is_refused_by_layer_and_expert() {
        let error = |slots: &[u32]| map(3, 2, slots).unwrap_err().to_string();
        assert_eq!(error(&[0, 1, 1, 0]), "layer 0: expert 2 has no slot");
        assert_eq!(error(&[0, 1, 2, 3]), "layer 0: expert 3, the model has 3");
        assert_eq!(error(&[0, 1, 2]), "layer 0: 3 slots, expected 3 as in layer 0, a multiple of 2");
        assert_eq!(map(3, 0, &[0, 1, 2]), Err(SlotMapError::Ranks { ranks: 0 }));
    }
}
