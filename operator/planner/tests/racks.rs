//! Random stories on nodes: machines fail, fill up and come back in any order, with each backend. Whatever happens, no
//! supernode spans racks, no node gives more than it has, no rack has two ComputeDomains (the story checks it after each
//! plan), plans come to rest, and in the end everything serves.

use deepinfer_crds::DeepInferCluster;
use deepinfer_planner::script;
use proptest::prelude::*;

const START: &str = "target kubernetes
nodes 3 domain rack-a nvidia.com/gpu 4
nodes 3 domain rack-b nvidia.com/gpu 4
nodes 6 domain rack-c nvidia.com/gpu 4
nodes 2 domain - nvidia.com/gpu 4
cluster typical
model ready
set spec.prefill {\"replicas\":1}
unset spec.decode.scaling
unset spec.decode.rollout
set spec.decode.supernode {\"nodes\":3}
set spec.decode.replicas 2
set spec.decode.experts {\"mode\":\"Off\"}
set spec.gateway {\"replicas\":1}
set spec.kvCache {\"mode\":\"None\"}
set spec.model.source {\"uri\":\"file:///models/v41\"}
";

fn load(_: &str) -> Result<DeepInferCluster, String> {
    serde_yaml::from_str(include_str!("../../../examples/clusters/typical.yaml")).map_err(|e| e.to_string())
}

fn rack() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just("rack-a"),
        Just("rack-b"),
        Just("rack-c"),
        Just("rack-a-00"),
        Just("rack-b-01"),
        Just("rack-c-02")
    ]
}

fn command() -> impl Strategy<Value = String> {
    let machine = (
        rack(),
        prop_oneof![
            Just("notready"),
            Just("ready"),
            Just("cordon"),
            Just("uncordon"),
            Just("taint maintenance"),
            Just("untaint maintenance"),
            Just("used nvidia.com/gpu 0"),
            Just("used nvidia.com/gpu 4"),
        ],
    );
    prop_oneof![
        4 => machine.prop_map(|(rack, what)| format!("node {rack} {what}")),
        1 => (0..4_u32).prop_map(|n| format!("set spec.operation {{\"restartToken\":\"{n}\"}}")),
        1 => (1..4_u32).prop_map(|n| format!("set spec.decode.replicas {n}")),
        1 => (2..5_u32).prop_map(|n| format!("set spec.decode.supernode {{\"nodes\":{n}}}")),
        1 => Just("fail decode Error".to_owned()),
        1 => Just("lose decode".to_owned()),
        1 => Just("silent decode".to_owned()),
        2 => Just("serve".to_owned()),
        1 => Just("drained decode".to_owned()),
        2 => Just("end".to_owned()),
        2 => (1..700_i64).prop_map(|n| format!("advance {n}")),
    ]
}

fn apis() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just("apis"),
        Just("apis computedomain"),
        Just("apis native topology"),
        Just("apis native"),
        Just("apis native topology computedomain"),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gangs_stay_whole_and_serve_in_the_end(
        apis in apis(),
        commands in prop::collection::vec(command(), 0..25),
    ) {
        let mut story = format!("{START}{apis}\nrun\n");
        for command in &commands {
            story += &format!("{command}\nrun\n");
        }
        // The machines are whole again, the user wants what fits, and time passes.
        for heal in ["ready", "uncordon", "untaint maintenance", "used nvidia.com/gpu 0"] {
            story += &format!("node rack {heal}\n");
        }
        // Drains and the driver come to an end, too, and from now on at once: who takes 700 s to clean up a fabric is
        // stuck, and its nodes are avoided for hours.
        let ends = "drained decode\nrun\nend\nrun\n";
        story += &format!("run\n{ends}");
        story += "set spec.decode.supernode {\"nodes\":3}\nset spec.decode.replicas 2\n";
        story += "set spec.operation {\"restartToken\":\"end\"}\nadvance 23000\n";
        for _ in 0..10 {
            story += &format!("run\nserve\nrun\n{ends}serve\nrun\nadvance 700\n{ends}serve\nrun\n");
        }
        story += "why\nstatus\nplan\n";
        let told = script::run(&story, &load)
            .unwrap_or_else(|error| panic!("{}\n{error}\nthe story:\n{story}", error.told));
        let end = &told[told.rfind("> why").expect("the story ends with its status")..];
        prop_assert!(end.contains("phase Serving"), "{story}\n{end}");
        prop_assert!(end.contains("nothing to do"), "{story}\n{end}");
    }
}
