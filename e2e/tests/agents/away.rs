//! The operator goes away, comes back, and says what cannot be.

use std::fs;

use deepinfer_protocol::Generation;
use deepinfer_protocol::fleet::FleetView;

use crate::cluster::{Cluster, Spec};
use crate::load::{Load, ask, questions, undisturbed};
use crate::pods::until;

#[test]
fn without_the_operator_no_request_is_lost_and_its_newer_view_is_followed_when_it_is_back() {
    let mut cluster = Cluster::start(Spec::of(2, &[1, 1], 2));
    let questions = questions(12, 60);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(10);
    let load = Load::start(cluster.api(0), &questions);
    cluster.operator.go_away();
    load.expect(&expected);
    // An agent dies while nobody names another leader: the gateways place by themselves.
    let load = Load::start(cluster.api(1), &questions);
    cluster.find_mut("sn-0-00").kill();
    load.expect(&expected);
    Load::start(cluster.api(0), &questions).expect(&expected);

    cluster.operator.come_back();
    cluster.operator.remove("sn-0-00");
    cluster.supernode("sn-2", 1);
    cluster.wait_serving("sn-2-00");
    let newest = cluster.operator.view().generation.0;
    for gateway in [0, 1] {
        until("the gateway follows", || {
            (cluster.gateway_status(gateway)["fleetGeneration"].as_u64() >= Some(newest)).then_some(())
        });
    }
    Load::start(cluster.api(0), &questions).expect(&expected);
    cluster.wait_empty(&["p-0", "p-1", "sn-1-00", "sn-2-00"]);
}

#[test]
fn a_lower_generation_and_a_view_of_another_cluster_are_refused() {
    let cluster = Cluster::start(Spec::of(1, &[1], 1));
    let question = questions(1, 10)[0];
    let expected = ask(cluster.api(0), question).unwrap();
    let followed = cluster.operator.view();
    let empty = |generation, cluster: &str| FleetView {
        generation: Generation(generation),
        cluster: cluster.to_owned(),
        ..FleetView::default()
    };
    let lies = [empty(followed.generation.0 - 1, "tiny"), empty(followed.generation.0 + 1000, "another")];
    for (told, lie) in lies.into_iter().enumerate() {
        cluster.operator.lie(Some(lie));
        until("the gateway refuses it", || {
            let text = cluster.get(cluster.api(0), "/metrics").unwrap().body;
            let line = text.lines().find(|l| l.starts_with("deepinfer_fleet_refused_views_total"))?;
            (line.split(' ').nth(1)?.parse::<f64>().ok()? > told as f64).then_some(())
        });
        assert_eq!(ask(cluster.api(0), question).as_ref(), Ok(&expected));
        let generation = cluster.gateway_status(0)["fleetGeneration"].as_u64();
        assert_eq!(generation, Some(followed.generation.0));
    }
    assert!(cluster.gateways[0].log().contains("lower than"), "{}", cluster.gateways[0].log());
}

#[test]
fn a_restart_while_the_operator_is_away_serves_from_the_ledger() {
    let mut cluster = Cluster::start(Spec::of(1, &[2], 1));
    let question = questions(1, 10)[0];
    let expected = ask(cluster.api(0), question).unwrap();
    let generation = cluster.operator.view().generation.0;
    until("the ledger has the newest view", || {
        let text = fs::read_to_string(cluster.path("g-0/fleet.json")).ok()?;
        let view: FleetView = serde_json::from_str(&text).expect("the file is whole at every moment");
        (view.generation.0 == generation).then_some(())
    });
    cluster.operator.go_away();
    cluster.gateways[0].restart();
    cluster.find_mut("sn-0-01").restart();
    cluster.find_mut("p-0").restart();
    for agent in ["p-0", "sn-0-01"] {
        let ready =
            || (cluster.get(cluster.find(agent).port(9810), "/readyz").ok()?.status == 200).then_some(());
        until(&format!("{agent} is ready"), ready);
    }
    cluster.wait_gateways();
    assert_eq!(ask(cluster.api(0), question).as_ref(), Ok(&expected));
    assert_eq!(cluster.gateway_status(0)["fleetGeneration"].as_u64(), Some(generation));

    // A damaged file is named and passed over.
    cluster.gateways[0].kill();
    fs::write(cluster.path("g-0/fleet.json"), "{\"generation\": 3, \"clu").unwrap();
    cluster.gateways[0].restart();
    until("it answers", || cluster.get(cluster.api(0), "/readyz").ok());
    until("it names the file", || {
        let log = cluster.gateways[0].log();
        (log.contains("damaged") && log.contains("g-0/fleet.json")).then_some(())
    });
    cluster.operator.come_back();
    cluster.wait_gateways();
}
