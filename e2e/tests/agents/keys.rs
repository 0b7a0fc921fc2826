//! Keys: they roll without a restart, and are never written anywhere.

use std::fs;

use deepinfer_protocol::Generation;
use deepinfer_transport::ClusterKey;

use crate::cluster::{Cluster, FIRST_KEY, Spec, hex};
use crate::http::Call;
use crate::load::{Load, questions, undisturbed};
use crate::pods::{swap, until};

#[test]
fn keys_roll_under_load_and_the_key_before_last_is_refused() {
    let mut cluster = Cluster::start(Spec::of(1, &[1, 1], 1));
    let questions = questions(8, 100);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(15);
    let load = Load::start(cluster.api(0), &questions);
    let (one, two, three) =
        ((Generation(1), FIRST_KEY), (Generation(2), [0x22; 32]), (Generation(3), [0x33; 32]));
    let signed = |cluster: &Cluster, agent: &str, key: (Generation, [u8; 32])| {
        let key = ClusterKey::of(vec![key]);
        let call = Call::new(cluster.find(agent).port(9810), "GET", "/v1/status").signed(&key);
        call.send().expect("it answers").status
    };
    let accepts = |cluster: &Cluster, key: (Generation, [u8; 32]), status: u16| {
        for agent in ["p-0", "sn-0-00", "sn-1-00"] {
            until("the keys are read", || (signed(cluster, agent, key) == status).then_some(()));
        }
    };
    // The operator accepts both, then writes the new one, then signs with it.
    cluster.key.replace(vec![two, one]);
    swap(&cluster.path("keys/2"), &hex(&two.1));
    accepts(&cluster, two, 200);
    accepts(&cluster, one, 200);
    load.expect(&expected);
    // An agent that starts now signs with the new key only where it must; old connections and new ones live together.
    fs::remove_file(cluster.path("keys/1")).unwrap();
    cluster.supernode("sn-2", 1);
    cluster.wait_serving("sn-2-00");
    cluster.key.replace(vec![three, two]);
    swap(&cluster.path("keys/3"), &hex(&three.1));
    accepts(&cluster, three, 200);
    accepts(&cluster, one, 401);
    Load::start(cluster.api(0), &questions).expect(&expected);
    for pod in cluster.agents.iter().chain(&cluster.gateways) {
        let log = pod.log();
        assert!(log.contains("keys have changed") || pod.name == "sn-2-00", "{log}");
        for key in [one, two, three] {
            assert!(!log.contains(&hex(&key.1)[..16]), "{} shows a key", pod.name);
        }
    }
    // A file that is no key changes nothing.
    swap(&cluster.path("keys/4"), "no key");
    until("the file is named", || {
        let log = cluster.find("p-0").log();
        (log.contains("keys/4") && log.contains("64 hex digits")).then_some(())
    });
    accepts(&cluster, three, 200);
}
