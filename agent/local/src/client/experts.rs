//! `deepinfer experts`: which experts the tokens of a running cluster chose.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Result, bail};
use deepinfer_protocol::load::{ExpertLoadReport, LoadRole};

use super::{ask, choose, heat, root, show};
use crate::cluster::args::{ExpertsArgs, ExpertsRole, Layers};
use crate::report;
use crate::up::control::{Answer, Question};

/// Experts in the list of the hottest.
const HOTTEST: usize = 16;

/// Shows the counts.
pub fn run(args: ExpertsArgs) -> Result<ExitCode> {
    let root = root(&args.state)?;
    let name = choose(&root, args.name.as_deref())?;
    let colour = std::io::stdout().is_terminal();
    let question = Question::Experts { total: !args.window };
    show(args.watch, || match ask(&root, &name, &question)? {
        Answer::Experts(reports) => {
            let reports: Vec<_> =
                reports.into_iter().filter(|report| wanted(report.role, args.role)).collect();
            if args.json {
                return Ok(serde_json::to_string_pretty(&reports)? + "\n");
            }
            Ok(text(&reports, args.layers.as_ref(), colour))
        }
        Answer::Refused(reason) => bail!("{reason}"),
        _ => bail!("the running cluster is of another release"),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn wanted(role: LoadRole, asked: Option<ExpertsRole>) -> bool {
    match asked {
        None => true,
        Some(ExpertsRole::Decode) => role == LoadRole::Decode,
        Some(ExpertsRole::Prefill) => role == LoadRole::Prefill,
    }
}

fn text(reports: &[ExpertLoadReport], layers: Option<&Layers>, colour: bool) -> String {
    if reports.is_empty() {
        return "no tokens have been counted yet\n".to_owned();
    }
    let parts: Vec<String> = reports.iter().map(|report| one(report, layers, colour)).collect();
    parts.join("\n")
}

/// One agent's experts.
fn one(load: &ExpertLoadReport, layers: Option<&Layers>, colour: bool) -> String {
    let counts = &load.counts;
    let total: u64 = counts.counts.iter().sum();
    let role = if load.role == LoadRole::Prefill { "prefill" } else { "decode" };
    let place = load.supernode.as_ref().map_or_else(|| load.agent.to_string(), ToString::to_string);
    let mut text =
        format!("{role} {place}: {} token rows in {} steps\n", report::count(load.rows), load.steps);
    let rows = counts.counts.chunks(counts.experts.max(1) as usize);
    for (layer, row) in (0_u32..).zip(rows) {
        if layers.is_some_and(|chosen| !chosen.0.contains(&layer)) {
            continue;
        }
        let _ = writeln!(text, "{layer:4} {}", if colour { heat::colours(row) } else { heat::numbers(row) });
    }
    let _ = writeln!(
        text,
        "total {} = {} layers x {} experts a token x {} rows{}",
        report::count(total),
        counts.layers,
        load.top_k,
        report::count(load.rows),
        if load.spans_change { " (spans a change of ranks)" } else { "" }
    );
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    let ranks: Vec<String> =
        load.by_rank.iter().map(|(rank, count)| format!("{rank}: {}", report::count(*count))).collect();
    let _ = writeln!(
        text,
        "balancedness {}, balancedness_c2 {} over {} ranks ({})",
        number(load.balance.balancedness),
        number(load.balance.balancedness_c2),
        load.by_rank.len(),
        ranks.join(", ")
    );
    text + &hottest(load, layers)
}

/// The hottest experts: by share of their layer, then lowest layer, then lowest expert.
fn hottest(load: &ExpertLoadReport, layers: Option<&Layers>) -> String {
    let counts = &load.counts;
    let width = counts.experts.max(1) as usize;
    let mut all: Vec<(u64, u64, u32, usize)> = Vec::new();
    for (layer, row) in (0_u32..).zip(counts.counts.chunks(width)) {
        let sum: u64 = row.iter().sum();
        if sum > 0 && layers.is_none_or(|chosen| chosen.0.contains(&layer)) {
            let share =
                |count: u64| u64::try_from(u128::from(count) * 1_000_000 / u128::from(sum)).unwrap_or(0);
            all.extend(row.iter().enumerate().map(|(expert, count)| (share(*count), *count, layer, expert)));
        }
    }
    all.sort_by_key(|&(share, _, layer, expert)| (std::cmp::Reverse(share), layer, expert));
    let mut text = String::from("hottest (layer/expert, share of the layer, tokens):\n");
    for (share, count, layer, expert) in all.into_iter().take(HOTTEST).filter(|(_, count, ..)| *count > 0) {
        let _ = writeln!(text, "  {layer}/{expert}  {:.1} %  {}", share as f64 / 1e4, report::count(count));
    }
    text
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::load::{Balance, ExpertCounts};
    use deepinfer_protocol::{AgentId, Generation, Rank};

    use super::*;

    fn load() -> ExpertLoadReport {
        ExpertLoadReport {
            agent: AgentId::from("d-00"),
            supernode: None,
            role: LoadRole::Decode,
            window: 0,
            first_step: 0,
            steps: 3,
            rows: 10,
            top_k: 2,
            placement: Generation(0),
            spans_change: false,
            counts: ExpertCounts { layers: 2, experts: 4, counts: vec![10, 5, 5, 0, 0, 0, 4, 16] },
            by_step: Vec::new(),
            by_rank: vec![(Rank(0), 19), (Rank(1), 21)],
            busy_ns: Vec::new(),
            missing: Vec::new(),
            balance: Balance { balancedness: Some(0.952_38), ..Balance::default() },
        }
    }

    #[test]
    fn the_map_ends_with_its_sum_and_the_hottest_come_first() {
        let text = text(&[load()], None, false);
        assert!(text.contains("total 40 = 2 layers x 2 experts a token x 10 rows"), "{text}");
        assert!(text.contains("balancedness 0.952") && text.contains("0: 19, 1: 21"), "{text}");
        let hottest: Vec<&str> =
            text.lines().skip_while(|line| !line.starts_with("hottest")).skip(1).collect();
        assert_eq!(hottest[0], "  1/3  80.0 %  16");
        assert_eq!(hottest[1], "  0/0  50.0 %  10");
        assert_eq!(hottest.len(), 5, "experts without a token are not hot");
    }

    #[test]
    fn chosen_layers_are_the_only_ones() {
        let text = text(&[load()], Some(&Layers(vec![1])), false);
        assert!(!text.contains("   0 ") && text.contains("   1 0 0 4 16"), "{text}");
    }
}
