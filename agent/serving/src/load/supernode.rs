//! Reports of several agents of one supernode, put together.
//!
//! Agents with engines of their own do not step together: their windows have numbers and lengths of their own. What is
//! summed are the last windows of each, and figures of evenness are means over steps, of the ranks that do step
//! together. Counts stay exact: `layers x top_k x rows` is the sum of the counts, whatever is missing.

use deepinfer_protocol::AgentId;
use deepinfer_protocol::load::{Balance, ExpertLoadReport};

/// The report of index 0 with those of the others added. `missing`: agents that did not answer. Reports of another
/// model (other layers or experts) count as missing.
pub fn sum_of_agents(
    own: ExpertLoadReport,
    others: Vec<ExpertLoadReport>,
    mut missing: Vec<AgentId>,
) -> ExpertLoadReport {
    let (layers, experts) = (own.counts.layers, own.counts.experts);
    let mut balance = Mean::default();
    balance.add(own.steps, &own.balance);
    let mut sum = own;
    for report in others {
        let counts = &report.counts;
        if (counts.layers, counts.experts) != (layers, experts)
            || counts.counts.len() != sum.counts.counts.len()
        {
            missing.push(report.agent);
            continue;
        }
        balance.add(report.steps, &report.balance);
        sum.counts.counts.iter_mut().zip(&counts.counts).for_each(|(sum, count)| *sum += count);
        sum.rows += report.rows;
        sum.steps = sum.steps.saturating_add(report.steps);
        sum.window = sum.window.max(report.window);
        sum.placement = sum.placement.max(report.placement);
        sum.spans_change |= report.spans_change;
        sum.by_step.extend(report.by_step);
        sum.by_rank.extend(report.by_rank);
        sum.busy_ns.extend(report.busy_ns);
    }
    sum.by_rank.sort_unstable();
    sum.busy_ns.sort_unstable();
    missing.sort_unstable();
    sum.spans_change |= !missing.is_empty();
    sum.missing = missing;
    sum.balance = balance.finish();
    sum
}

/// Means over steps.
#[derive(Debug, Default)]
struct Mean {
    balancedness: (f64, f64),
    balancedness_c2: (f64, f64),
    peaks: Vec<f64>,
    steps: f64,
}

impl Mean {
    fn add(&mut self, steps: u32, balance: &Balance) {
        let steps = f64::from(steps);
        let add = |sum: &mut (f64, f64), figure: Option<f64>| {
            if let Some(figure) = figure {
                *sum = (sum.0 + figure * steps, sum.1 + steps);
            }
        };
        add(&mut self.balancedness, balance.balancedness);
        add(&mut self.balancedness_c2, balance.balancedness_c2);
        self.peaks.resize(self.peaks.len().max(balance.peak_by_layer.len()), 0.0);
        self.peaks.iter_mut().zip(&balance.peak_by_layer).for_each(|(sum, peak)| *sum += peak * steps);
        self.steps += steps;
    }

    fn finish(self) -> Balance {
        let mean = |(sum, steps): (f64, f64)| (steps > 0.0).then(|| sum / steps);
        let peak = |sum: f64| if self.steps > 0.0 { sum / self.steps } else { 1.0 };
        Balance {
            balancedness: mean(self.balancedness),
            balancedness_c2: mean(self.balancedness_c2),
            peak_by_layer: self.peaks.iter().map(|&sum| peak(sum)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::load::{ExpertCounts, LoadRole};
    use deepinfer_protocol::{Generation, Rank};

    use super::*;

    fn report(agent: &str, rank: u16, steps: u32, counts: [u64; 4]) -> ExpertLoadReport {
        let rows = counts.iter().sum::<u64>() / 2;
        ExpertLoadReport {
            agent: agent.into(),
            supernode: Some("sn".into()),
            role: LoadRole::Decode,
            window: u64::from(rank),
            first_step: 0,
            steps,
            rows,
            top_k: 1,
            placement: Generation(0),
            spans_change: false,
            counts: ExpertCounts { layers: 2, experts: 2, counts: counts.to_vec() },
            by_step: Vec::new(),
            by_rank: vec![(Rank(rank), rows * 2)],
            busy_ns: vec![(Rank(rank), 7)],
            balance: Balance {
                balancedness: (steps > 0).then_some(1.0 / f64::from(rank + 1)),
                balancedness_c2: None,
                peak_by_layer: vec![1.0, f64::from(rank + 1)],
            },
            missing: Vec::new(),
        }
    }

    #[test]
    fn counts_of_all_agents_are_summed_exactly_and_figures_are_means_over_steps() {
        let sum = sum_of_agents(
            report("sn-0", 0, 100, [1, 2, 3, 0]),
            vec![report("sn-1", 1, 300, [10, 0, 0, 10])],
            vec![],
        );
        assert_eq!((sum.agent.as_str(), sum.rows, sum.steps), ("sn-0", 13, 400));
        assert_eq!(sum.counts.counts, [11, 2, 3, 10]);
        assert_eq!(sum.counts.counts.iter().sum::<u64>(), 2 * u64::from(sum.top_k) * sum.rows);
        assert_eq!(sum.by_rank, [(Rank(0), 6), (Rank(1), 20)]);
        assert_eq!(sum.balance.balancedness, Some((100.0 + 150.0) / 400.0));
        assert_eq!(sum.balance.peak_by_layer, [1.0, (100.0 + 600.0) / 400.0]);
        assert!(!sum.spans_change && sum.missing.is_empty());
    }

    #[test]
    fn an_agent_that_does_not_answer_or_runs_another_model_is_marked() {
        let mut other = report("sn-2", 2, 100, [1, 1, 1, 1]);
        other.counts = ExpertCounts { layers: 1, experts: 4, counts: vec![1; 4] };
        let sum = sum_of_agents(report("sn-0", 0, 100, [1, 1, 1, 1]), vec![other], vec!["sn-1".into()]);
        assert_eq!(sum.missing, ["sn-1", "sn-2"].map(AgentId::from));
        assert!(sum.spans_change, "not to be used for a decision");
        assert_eq!(sum.counts.counts, [1, 1, 1, 1]);
    }

    #[test]
    fn without_any_step_there_are_no_figures() {
        let sum = sum_of_agents(report("a", 0, 0, [0; 4]), vec![report("b", 1, 0, [0; 4])], vec![]);
        assert_eq!((sum.balance.balancedness, &sum.balance.peak_by_layer[..]), (None, &[1.0, 1.0][..]));
    }
}
