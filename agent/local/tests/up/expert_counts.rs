//! Expert counts are exact, and many streams at once get the right tokens.

use std::sync::Arc;

use serde_json::Value;

use crate::harness::{Spec, Up, complete, prompt, until};

#[test]
fn sixty_four_streams_at_once_get_the_right_tokens_and_every_expert_choice_is_counted() {
    let up = Up::start(&Spec { ranks: 2, ..Spec::shipped() });
    let reports = |up: &Up| -> Vec<Value> {
        let output = up.run(&["experts", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let (distinct, length, tokens) = (16_u32, 50_u32, 30_usize);
    let expected: Arc<Vec<Vec<u32>>> =
        Arc::new((0..distinct).map(|n| up.complete(&prompt(n, length), tokens).0).collect());
    let host = Arc::new(up.host.clone());
    let clients: Vec<_> = (0..64_u32)
        .map(|client| {
            let (host, expected) = (Arc::clone(&host), Arc::clone(&expected));
            std::thread::spawn(move || {
                let number = client % distinct;
                let (ids, cached) = complete(&host, &prompt(number, length), tokens).expect("an answer");
                assert_eq!(ids, expected[number as usize], "client {client}");
                cached
            })
        })
        .collect();
    let cached: u64 = clients.into_iter().map(|client| client.join().expect("the right tokens")).sum();
    let requests = u64::from(distinct) + 64;
    let mut seen = Vec::new();
    for report in reports(&up) {
        let number = |field: &str| report[field].as_u64().expect("a number");
        let counts = report["counts"]["counts"].as_array().expect("counts");
        let total: u64 = counts.iter().map(|count| count.as_u64().expect("a count")).sum();
        let layers = report["counts"]["layers"].as_u64().expect("a number");
        assert_eq!(total, layers * number("top_k") * number("rows"), "{}", report["role"]);
        let by_rank: u64 =
            report["by_rank"].as_array().expect("ranks").iter().map(|r| r[1].as_u64().expect("n")).sum();
        assert_eq!(by_rank, total, "what the ranks got is what was chosen");
        let rows = match report["role"].as_str() {
            // The first token comes from prefill; each further one is a row.
            Some("decode") => requests * (tokens as u64 - 1),
            _ => requests * u64::from(length) - cached,
        };
        assert_eq!(number("rows"), rows, "{}", report["role"]);
        seen.push(report["role"].as_str().map(str::to_owned));
    }
    seen.sort();
    assert_eq!(seen, [Some("decode".to_owned()), Some("prefill".to_owned())]);

    let map =
        String::from_utf8(up.run(&["experts", "--role", "decode", "--layers", "0-1"]).stdout).expect("UTF-8");
    assert!(map.contains("balancedness") && map.contains("over 2 ranks") && map.contains("hottest"), "{map}");
    assert_eq!(map.lines().filter(|line| line.starts_with("   ")).count(), 2, "{map}");
}

#[test]
#[ignore = "a soak of about a minute; run with --ignored"]
fn a_thousand_streams_at_once_get_the_right_tokens() {
    let up = Up::start(&Spec { ranks: 2, ..Spec::shipped() });
    let (distinct, length, tokens) = (20_u32, 40_u32, 24_usize);
    let expected: Arc<Vec<Vec<u32>>> =
        Arc::new((0..distinct).map(|n| up.complete(&prompt(n, length), tokens).0).collect());
    let clients: Vec<_> = (0..1000_u32)
        .map(|client| {
            let (host, expected) = (up.host.clone(), Arc::clone(&expected));
            std::thread::spawn(move || {
                let number = client % distinct;
                let (ids, _) = complete(&host, &prompt(number, length), tokens).expect("an answer");
                assert_eq!(ids, expected[number as usize], "client {client}");
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().expect("the right tokens"));
    until("nothing is left behind", || {
        let status = up.status();
        let pods = status["pods"].as_array().expect("pods").iter();
        let held = pods.filter_map(|pod| {
            let number = |field: &str| pod["agent"][field].as_u64();
            Some(number("kvBlocksUsed")? + number("parkedBytes")? + number("inflight")?)
        });
        (held.sum::<u64>() == 0).then_some(())
    });
}
