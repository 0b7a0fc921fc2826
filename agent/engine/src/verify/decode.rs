//! Recorded generations: `greedy_decode`, `speculative_greedy`, `bounded_replay`.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::{Logits, accept_greedy};

use super::checks::Checks;
use super::manifest::SpeculativeStep;
use super::session::{Session, Setup, Step, argmax};
use super::tensors::VectorFile;
use super::{Case, Stop, VerifyError};
use crate::engine::{BoundarySwa, Truncation};

/// Prefill in the recorded chunks, then greedy steps, with a draft block before those that recorded one.
pub(super) fn greedy<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    let file = case.vector()?;
    let tokens = case.tokens()?;
    let chunks = chunks(case, tokens.len())?;
    let longest = chunks.iter().copied().max().unwrap_or(1);
    let positions = tokens.len() + case.entry.generated.len() + case.draft_block();
    let setup = Setup::exact(case.numerics, positions, longest);
    let mut session = case.session(setup)?;
    let mut at = 0;
    for chunk in &chunks {
        let step = Step {
            tokens: tokens[at..at + chunk].to_vec(),
            prompt_tokens: Some(tokens.len()),
            ..Step::default()
        };
        session.step(step, None)?;
        at += chunk;
    }
    continue_greedily(case, &file, &mut session, checks)
}

fn chunks<B: Backend>(case: &Case<'_, B>, tokens: usize) -> Result<Vec<usize>, VerifyError> {
    let chunks = match case.entry.chunks.as_slice() {
        [] => vec![tokens],
        chunks => chunks.to_vec(),
    };
    if chunks.iter().sum::<usize>() != tokens || chunks.contains(&0) {
        return Err(case.bad(format!("chunks {chunks:?} do not add up to {tokens} tokens")));
    }
    Ok(chunks)
}

/// Greedy steps after a prefill, as recorded.
fn continue_greedily<B: Backend>(
    case: &Case<'_, B>,
    file: &VectorFile,
    session: &mut Session<B>,
    checks: &mut Checks,
) -> Result<(), Stop> {
    if file.find("prefill_last_logits").is_some() {
        let (_, want) = file.floats("prefill_last_logits")?;
        checks.logits("prefill_last_logits", want, session.last());
    }
    let want = &case.entry.generated;
    let mut generated = vec![argmax(session.last())];
    for (k, token) in want.iter().enumerate().take(want.len().saturating_sub(1)) {
        if file.find(&format!("draft{k}_ids")).is_some() {
            compare_draft(file, k, *token, session, checks)?;
        }
        // The recorded token is fed, so that a wrong one shows once and not as garbage from there on.
        session.decode(*token)?;
        let name = format!("step{k}_logits");
        let (_, want) = file.floats(&name)?;
        checks.logits(&name, want, session.last());
        generated.push(argmax(session.last()));
    }
    checks.equal("generated", want, &generated);
    Ok(())
}

fn compare_draft<B: Backend>(
    file: &VectorFile,
    k: usize,
    token: u32,
    session: &mut Session<B>,
    checks: &mut Checks,
) -> Result<(), Stop> {
    let name = |part: &str| format!("draft{k}_{part}");
    let draft = session.draft(token)?;
    let got: Vec<i64> = draft.tokens.iter().map(|t| i64::from(*t)).collect();
    checks.equal(&name("ids"), file.whole(&name("ids"))?.1, &got);
    checks.logits(&name("logits"), file.floats(&name("logits"))?.1, &draft.logits);
    let confidence = name("confidence");
    checks.logits(&confidence, file.floats(&confidence)?.1, &draft.confidence);
    Ok(())
}

/// The real loop: draft, verify all drafts in one step, accept, roll back.
pub(super) fn speculative<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    let tokens = case.tokens()?;
    let cycles = &case.entry.steps;
    if cycles.is_empty() {
        return Err(case.bad("no steps".to_string()).into());
    }
    let block = case.draft_block();
    let emitted: usize = cycles.iter().map(|c| c.emitted.len()).sum();
    let setup = Setup::exact(case.numerics, tokens.len() + emitted + block + 1, tokens.len().max(block + 1));
    let mut session = case.session(setup)?;
    let prefill = Step { tokens: tokens.to_vec(), prompt_tokens: Some(tokens.len()), ..Step::default() };
    session.step(prefill, None)?;
    let mut token = argmax(session.last());
    let (mut got, mut all) = (Vec::new(), Vec::new());
    for _ in cycles {
        let cycle = cycle(&mut session, token)?;
        all.extend_from_slice(&cycle.emitted);
        token = *cycle.emitted.last().unwrap_or(&token);
        got.push(cycle);
    }
    checks.equal("steps", cycles, &got);
    checks.equal("emitted", &case.entry.emitted, &all);
    Ok(())
}

fn cycle<B: Backend>(session: &mut Session<B>, token: u32) -> Result<SpeculativeStep, Stop> {
    let position = session.held();
    let drafts = session.draft(token)?.tokens.clone();
    let verify =
        Step { tokens: [&[token], drafts.as_slice()].concat(), logits: Logits::All, ..Step::default() };
    session.step(verify, None)?;
    let targets: Vec<u32> = session.rows().map(argmax).collect();
    let verdict = accept_greedy(&drafts, &targets);
    let emitted = [&drafts[..verdict.accepted], &[verdict.next]].concat();
    session.truncate(position + emitted.len())?;
    Ok(SpeculativeStep { position, token, drafts, emitted })
}

/// A prefill whose consumer half runs on the last rows only, then greedy steps; in both ways of computing it.
pub(super) fn bounded_replay<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    let file = case.vector()?;
    let tokens = case.tokens()?;
    let Some(keep) = case.entry.keep_tokens else {
        return Err(case.bad("no keep_tokens".to_string()).into());
    };
    let boundary_swa = match case.entry.boundary_swa.as_deref() {
        Some("truncated") => BoundarySwa::Truncated,
        Some("full") => BoundarySwa::Full,
        other => {
            let detail = format!("boundary_swa {other:?}; truncated and full are known");
            return Err(case.bad(detail).into());
        }
    };
    let (_, want) = file.floats("logits_kept_rows")?;
    for truncation in [Truncation::Compact, Truncation::Mask] {
        let setup = Setup {
            truncation,
            keep: Some(keep),
            boundary_swa,
            ..Setup::exact(case.numerics, tokens.len() + case.entry.generated.len(), tokens.len())
        };
        let mut session = case.session(setup)?;
        let prefill = Step {
            tokens: tokens.to_vec(),
            logits: Logits::All,
            prompt_tokens: Some(tokens.len()),
            ..Step::default()
        };
        session.step(prefill, None)?;
        let got = session.logits();
        let from = got.len().saturating_sub(want.len());
        checks.logits("logits_kept_rows", want, &got[from..]);
        continue_greedily(case, &file, &mut session, checks)?;
    }
    Ok(())
}
