//! Random stories: whatever users and machines do, plans obey the rules, come to rest, and in the end the cluster
//! serves. A story that fails can be given to `deepinfer script` as it stands.

use deepinfer_crds::DeepInferCluster;
use deepinfer_planner::script;
use proptest::prelude::*;

fn load(_: &str) -> Result<DeepInferCluster, String> {
    serde_yaml::from_str(include_str!("../../../examples/clusters/quickstart.yaml"))
        .map_err(|e| e.to_string())
}

fn command() -> impl Strategy<Value = String> {
    prop_oneof![
        (1..5_u32).prop_map(|n| format!("set spec.prefill.replicas {n}")),
        (1..3_u32).prop_map(|n| format!("set spec.decode.replicas {n}")),
        (1..9_u32).prop_map(|n| format!("set spec.decode.supernode.nodes {n}")),
        (0..3_u32)
            .prop_map(|n| format!("set spec.decode.experts {{\"mode\":\"Off\",\"extraSlotsPerRank\":{n}}}")),
        (0..3_u32).prop_map(|n| format!("set spec.operation {{\"restartToken\":\"{n}\"}}")),
        Just("set spec.operation {\"pause\":\"Rollouts\"}".to_owned()),
        Just("set spec.operation {\"suspend\":true}".to_owned()),
        Just("set spec.decode.supernode.spareNodes 1".to_owned()),
        Just("unset spec.decode.supernode.spareNodes".to_owned()),
        Just("model failed SourceUnreachable gone".to_owned()),
        Just("model ready".to_owned()),
        Just("start".to_owned()),
        Just("serve".to_owned()),
        (0..4_u32).prop_map(|n| format!("busy decode {n}")),
        Just("drained decode".to_owned()),
        Just("silent decode".to_owned()),
        Just("fail prefill OOMKilled".to_owned()),
        Just("fail decode Error".to_owned()),
        Just("lose decode".to_owned()),
        Just("lose gateway".to_owned()),
        Just("end".to_owned()),
        (1..100_i64).prop_map(|n| format!("advance {n}")),
        Just("run".to_owned()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_obey_the_rules_and_the_cluster_serves_in_the_end(commands in prop::collection::vec(command(), 0..25)) {
        let mut story = "target local\ncluster x\nrun\n".to_owned();
        for command in &commands {
            story += &format!("{command}\nrun\n");
        }
        // The faults end, the user wants something that is built, and time passes.
        story += "unset spec.decode.supernode.spareNodes\nunset spec.operation\nmodel ready\nadvance 4000\n";
        for _ in 0..8 {
            story += "run\nserve\nrun\nadvance 700\ndrained decode\nrun\nend\nserve\nrun\n";
        }
        story += "status\nplan\n";
        let told = script::run(&story, &load)
            .unwrap_or_else(|error| panic!("{}\n{error}\nthe story:\n{story}", error.told));
        let end = &told[told.rfind("> status").expect("the story ends with its status")..];
        prop_assert!(end.contains("phase Serving"), "{story}\n{end}");
        prop_assert!(end.contains("nothing to do"), "{story}\n{end}");
    }

    #[test]
    fn a_cluster_can_be_deleted_at_any_moment_and_leaves_nothing(commands in prop::collection::vec(command(), 0..12)) {
        let mut story = "target local\ncluster x\nrun\n".to_owned();
        for command in &commands {
            story += &format!("{command}\nrun\n");
        }
        story += "delete\nrun\n";
        for _ in 0..3 {
            story += "drained\nrun\nadvance 1000\nrun\nend\nrun\n";
        }
        story += "show\n";
        let told = script::run(&story, &load)
            .unwrap_or_else(|error| panic!("{}\n{error}\nthe story:\n{story}", error.told));
        prop_assert!(told.ends_with("> show\n"), "{story}\n{}", &told[told.len().saturating_sub(2000)..]);
    }
}
