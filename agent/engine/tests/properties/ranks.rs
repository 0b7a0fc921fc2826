//! Ranks and moves in models of random shapes: what the tests of ranks show for the golden ones.

use deepinfer_kernels::Cpu;
use deepinfer_serving::batch::StateSlot;

use crate::group::Group;
use crate::support::{Rig, bits, options};
use crate::{TOKENS, for_random_models};

/// Fewer models than elsewhere: each runs several engines.
const CASES: u32 = 32;

#[test]
fn ranks_and_moves_between_engines_change_no_bit_for_random_shapes() {
    for_random_models(CASES, |model, numerics, rng| {
        let vocab = model.shape.vocab_size;
        let ranks = rng.within(2, 4);
        let experts = model.shape.n_routed_experts;
        let extra = rng.below(2).min(experts - experts.div_ceil(ranks));
        let open = |slots| options(numerics, slots, 2 * TOKENS, TOKENS);
        let mut group = Group::open(model, &open(1), ranks, extra);
        let texts: Vec<Vec<u32>> = (0..ranks).map(|_| rng.tokens(TOKENS, vocab)).collect();
        let cut = rng.within(1, TOKENS - 1);
        // Rank 0 runs the first part of its text, the others all of theirs or nothing.
        let mut batches: Vec<_> = (0..ranks)
            .map(|rank| match rng.below(3) {
                0 => Vec::new(),
                _ => vec![group.rigs[rank].sequence(0, 0, &texts[rank])],
            })
            .collect();
        batches[0] = vec![group.rigs[0].sequence(0, 0, &texts[0][..cut])];
        group.step(&batches);
        let alone = |text: &[u32]| bits(&Rig::open(Cpu::new(2), model, open(1)).extend(0, text));
        for rank in (1..ranks).filter(|rank| !batches[*rank].is_empty()) {
            if bits(&group.rigs[rank].out.logits) != alone(&texts[rank]) {
                return Err(format!("{numerics}: rank {rank} of {ranks} with {extra} extra slots"));
            }
        }
        let rows: usize = batches.iter().flatten().map(|s| s.tokens.len()).sum();
        let arrived: u32 = group.rigs.iter().flat_map(|rig| &rig.out.arrivals).sum();
        let picks = rows * model.shape.num_hidden_layers * model.shape.num_experts_per_tok;
        if arrived as usize != picks {
            return Err(format!("{arrived} arrivals of {picks} picks"));
        }
        // The sequence of rank 0 moves to an engine alone and goes on there.
        let mut got = bits(&group.rigs[0].out.logits);
        let from = &group.rigs[0];
        let pieces = from.engine.export_pieces(StateSlot(0), from.blocks(0)).map_err(|e| e.to_string())?;
        let mut there = Rig::open(Cpu::new(2), model, open(2));
        there.extend(1, &texts[1]);
        let blocks = there.blocks(1).to_vec();
        there.engine.import_pieces(StateSlot(1), &blocks, &pieces).map_err(|e| e.to_string())?;
        for token in &texts[0][cut..] {
            got.extend(bits(&there.extend(1, &[*token])));
        }
        match got == alone(&texts[0]) {
            true => Ok(()),
            false => Err(format!("{numerics}: moved after {cut} tokens")),
        }
    });
}
