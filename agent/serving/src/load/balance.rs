//! How even the ranks of a supernode were, from the tokens that each received in each step and layer.

use deepinfer_protocol::load::Balance;

/// Sums from which a [`Balance`] is made. A cell is one layer of one step; cells without load are left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BalanceSum {
    cells: u64,
    /// Sum of mean / max.
    ratios: f64,
    /// Tokens of all cells.
    load: u128,
    /// Sum of ranks x max: what would have been possible at the pace of the slowest.
    paced: u128,
    /// By layer: sum of max / mean, and its cells.
    peaks: Vec<(f64, u64)>,
}

impl BalanceSum {
    /// Nothing yet, of a model with this many layers.
    pub fn new(layers: usize) -> Self {
        Self { peaks: vec![(0.0, 0); layers], ..Self::default() }
    }

    /// Counts one cell: tokens by rank. Layers beyond those of the model are ignored.
    pub fn add(&mut self, layer: usize, by_rank: &[u64]) {
        let load: u128 = by_rank.iter().map(|&n| u128::from(n)).sum();
        let max = by_rank.iter().copied().max().unwrap_or(0);
        let Some(peak) = self.peaks.get_mut(layer).filter(|_| max > 0) else {
            return;
        };
        let paced = u128::from(max) * by_rank.len() as u128;
        self.cells += 1;
        self.ratios += load as f64 / paced as f64;
        self.load += load;
        self.paced += paced;
        peak.0 += paced as f64 / load as f64;
        peak.1 += 1;
    }

    /// The figures.
    pub fn finish(&self) -> Balance {
        let any = self.cells > 0;
        let peak = |&(sum, cells): &(f64, u64)| if cells == 0 { 1.0 } else { sum / cells as f64 };
        Balance {
            balancedness: any.then(|| self.ratios / self.cells as f64),
            balancedness_c2: any.then(|| self.load as f64 / self.paced as f64),
            peak_by_layer: self.peaks.iter().map(peak).collect(),
        }
    }
}
