//! Stories of gangs on nodes, each named after what must hold; most are what users of other products reported.

use deepinfer_crds::DeepInferCluster;
use deepinfer_planner::script;

/// A cluster of `replicas` supernodes of two pods.
fn cluster(replicas: u32) -> String {
    format!(
        "nodes 2 domain - nvidia.com/gpu 4
cluster typical
model ready
set spec.prefill {{\"replicas\":1}}
unset spec.decode.scaling
unset spec.decode.rollout
set spec.decode.supernode {{\"nodes\":2}}
set spec.decode.replicas {replicas}
set spec.decode.experts {{\"mode\":\"Off\"}}
set spec.gateway {{\"replicas\":1}}
set spec.kvCache {{\"mode\":\"None\"}}
set spec.model.source {{\"uri\":\"file:///models/v41\"}}
run
"
    )
}

fn load(_: &str) -> Result<DeepInferCluster, String> {
    serde_yaml::from_str(include_str!("../../../examples/clusters/typical.yaml")).map_err(|e| e.to_string())
}

/// Tells a story; gives what its last command printed, and all of it.
fn tell(story: &str) -> (String, String) {
    let told = script::run(story, &load).unwrap_or_else(|error| panic!("{}\n{error}", error.told));
    let last = told.rfind("\n> ").map_or("", |at| &told[at + 1..]);
    (last.to_owned(), told)
}

/// `nodes` lines, then the cluster, then the rest.
fn racks(racks: &[(&str, u32)], replicas: u32, rest: &str) -> String {
    let racks: Vec<String> =
        racks.iter().map(|(rack, count)| format!("nodes {count} domain {rack} nvidia.com/gpu 4\n")).collect();
    format!("target kubernetes\n{}{}{rest}\n", racks.concat(), cluster(replicas))
}

fn count(text: &str, what: &str) -> usize {
    text.matches(what).count()
}

/// OP-040: what does not fit holds nothing, and takes nothing from those that do.
#[test]
fn with_room_for_three_of_four_supernodes_three_serve_and_one_holds_no_accelerator() {
    let four = [("rack-a", 2), ("rack-b", 2), ("rack-c", 2), ("rack-d", 1)];
    let (why, _) = tell(&racks(&four, 4, "serve\nrun\nwhy"));
    assert_eq!((count(&why, "Serving, rack-"), count(&why, "Pending, no domain")), (3, 1), "{why}");
    assert!(why.contains("rack-d: 0 of 1 nodes free (1 DomainTooSmall)"), "{why}");
    let (room, _) = tell(&racks(&four, 4, "serve\nrun\nroom"));
    assert!(room.contains("rack-d: 1 nodes, 0 of 4 accelerators held"), "{room}");
    let (status, _) = tell(&racks(&four, 4, "serve\nrun\nadvance 60\nrun\nstatus"));
    assert!(status.contains("decode 3/4") && status.contains("NotEnoughFree"), "{status}");
}

/// OP-038: nothing more than wanted is made, neither supernodes nor what belongs to them.
#[test]
fn a_first_install_makes_the_wanted_number_of_supernodes_gangs_and_compute_domains() {
    let three = [("rack-a", 2), ("rack-b", 2), ("rack-c", 2), ("rack-d", 2)];
    let story = racks(&three, 3, "serve\nrun\nadvance 60\nrun\nshow");
    let story = story.replacen("cluster typical", "apis native topology computedomain\ncluster typical", 1);
    let (show, told) = tell(&story);
    for (kind, wanted) in [("Supernode/", 3), ("Gang/", 3), ("ComputeDomain/", 3)] {
        assert_eq!(count(&show, kind), wanted, "{kind}\n{show}");
    }
    assert_eq!(count(&told, "SupernodeCreated"), 3, "none was made and taken back\n{told}");
}

/// OP-028: pods behind a gate are freed together or given up together.
#[test]
fn gates_are_lifted_together_or_the_gang_is_given_up_after_its_time_out() {
    let (_, told) = tell(&racks(&[("rack-a", 2)], 1, "why"));
    let lifted = told.find("ungate").expect("gates are lifted");
    assert_eq!(count(&told[lifted..], "ungate"), 2, "{told}");
    // The room goes between the pods and the lifting: a cordon in the same moment.
    let cordoned = |domains: &[(&str, u32)], rest: &str| {
        let story = racks(domains, 1, "");
        let before = story.rfind("run\n").expect("the first run");
        tell(&format!("{}step\nstep\nstep\nnode rack-a cordon\nrun\n{rest}", &story[..before]))
    };
    let (why, told) = cordoned(&[("rack-a", 2)], "why\n");
    assert!(told.contains("the room that it was made for is taken"), "{told}");
    assert!(!told.contains("GangTimeout") && why.contains("Placing, rack-a"), "{told}");
    let (why, told) = cordoned(&[("rack-a", 2)], "advance 700\nrun\nadvance 60\nrun\nwhy\n");
    assert!(told.contains("GangTimeout") && why.contains("Pending, no domain"), "{told}");
    // Room that comes back in time is taken, and so is room that is there again when nobody looked for long.
    let (why, told) = cordoned(&[("rack-a", 2)], "advance 700\nnode rack-a uncordon\nrun\nwhy\n");
    assert!(!told.contains("GangTimeout") && why.contains("Starting, rack-a"), "{told}");
    // An operator that was away for as long finds the room as it left it.
    let story = racks(&[("rack-a", 2)], 1, "");
    let before = story.rfind("run\n").expect("the first run");
    let (why, told) = tell(&format!("{}step\nstep\nstep\nadvance 700\nrun\nwhy\n", &story[..before]));
    assert!(!told.contains("GangTimeout") && why.contains("Starting, rack-a"), "{told}");
}

/// Gangs that wait for one domain do not wait for each other when a node of it is taken: as many go as have room.
#[test]
fn when_room_is_taken_the_gangs_that_still_have_some_go_and_the_others_wait_or_move() {
    let story = |others: &[(&str, u32)]| {
        let mut domains = vec![("rack-a", 6)];
        domains.extend(others);
        let story = racks(&domains, 3, "");
        let before = story.rfind("run\n").expect("the first run");
        format!("{}step\nstep\nstep\nnode rack-a-05 cordon\nrun\n", &story[..before])
    };
    let (why, told) = tell(&format!("{}why\n", story(&[])));
    assert_eq!((count(&why, "Starting, rack-a"), count(&why, "Placing, rack-a")), (2, 1), "{why}{told}");
    let more = "nodes 2 domain rack-b nvidia.com/gpu 4\nrun\nwhy\n";
    let (why, told) = tell(&format!("{}{more}", story(&[])));
    assert_eq!((count(&why, "Starting, rack-a"), count(&why, "Starting, rack-b")), (2, 1), "{why}{told}");
    assert_eq!(count(&told, "SupernodeFailed: RoomTaken"), 1, "{told}");
}

/// Pods behind a gate are bound to their domain: nobody waits for room there while another domain has some.
#[test]
fn a_gang_whose_room_was_taken_is_made_anew_where_there_is_room_at_once() {
    let story = racks(&[("rack-a", 2), ("rack-b", 2)], 1, "");
    let before = story.rfind("run\n").expect("the first run");
    let story = format!("{}step\nstep\nstep\nnode rack-a cordon\nrun\n", &story[..before]);
    let (why, told) = tell(&format!("{story}why\n"));
    assert!(
        told.contains("RoomTaken") && told.contains("its room in rack-a was taken, and rack-b has room"),
        "{told}"
    );
    assert!(why.contains("Starting, rack-b"), "{why}");
    let (room, told) = tell(&format!("{story}serve\nrun\nroom\n"));
    assert!(
        room.contains("rack-a: 2 nodes, 0 of 8") && room.contains("rack-b: 2 nodes, 8 of 8"),
        "{room}{told}"
    );
}

/// OP-133: what the scheduler says is in the status; after the gang time-out nothing is held.
#[test]
fn a_gang_that_cannot_be_bound_whole_names_the_schedulers_message_and_gives_everything_back() {
    let story = racks(&[("rack-a", 2)], 1, "");
    let before = story.rfind("run\n").expect("the first run");
    let story = format!("{}apis native\nstep\nstep\nstep\n", &story[..before]);
    let taken = "node rack-a-01 used nvidia.com/gpu 4\nrun\nwhy\n";
    let (why, _) = tell(&format!("{story}{taken}"));
    assert!(why.contains("scheduler: 0/4 nodes are available"), "{why}");
    let (room, told) = tell(&format!("{story}{taken}advance 700\nrun\nroom\n"));
    assert!(told.contains("GangTimeout"), "{told}");
    assert!(room.contains("rack-a: 2 nodes, 4 of 8 accelerators held"), "only the others' own\n{room}");
}

/// OP-022, OP-118: pods that cannot end on a dead node hold nobody up.
#[test]
fn a_dead_node_does_not_keep_a_new_incarnation_from_serving_elsewhere() {
    let rest = "serve\nrun\nadvance 60\nrun\nnode rack-a-01 notready\nadvance 40\nrun\nserve\nrun\nend\nwhy";
    let (why, told) = tell(&racks(&[("rack-a", 2), ("rack-b", 2)], 1, rest));
    assert!(why.contains("Serving, rack-b"), "{why}");
    assert!(told.contains("NodeNotReady"), "{told}");
    let (show, _) = tell(&racks(&[("rack-a", 2), ("rack-b", 2)], 1, &rest.replace("\nwhy", "\nshow")));
    assert!(
        count(&show, "Pod/v41-flash-decode-") >= 3,
        "the dead pod is still there under its old name\n{show}"
    );
}

/// OP-077: what a backend left behind goes with its incarnation.
#[test]
fn a_switch_of_the_backend_leaves_no_gang_object_behind() {
    let edit = "set spec.scheduling {\"backend\":\"Builtin\"}\nset spec.operation {\"restartToken\":\"2\"}\n";
    let rest = format!(
        "serve\nrun\nadvance 60\nrun\n{edit}run\nserve\nrun\nadvance 60\nrun\ndrained decode\nrun\nend\nrun\nshow"
    );
    let story = racks(&[("rack-a", 2), ("rack-b", 2)], 1, &rest);
    let story = story.replacen("cluster typical", "apis native topology\ncluster typical", 1);
    let (show, told) = tell(&story);
    assert!(told.contains("+ Gang/"), "{told}");
    assert_eq!((count(&show, "Gang/"), count(&show, "Supernode/")), (0, 1), "{show}");
}

/// OP-125: the limit holds for a second supernode and for a replacement.
#[test]
fn a_clique_has_one_compute_domain_whatever_is_surged_or_replaced() {
    let with_fabric =
        |story: String| story.replacen("cluster typical", "apis computedomain\ncluster typical", 1);
    let (why, told) = tell(&with_fabric(racks(&[("rack-a", 6)], 2, "why")));
    assert!(why.contains("CliqueBusy") && count(&why, "Starting, rack-a") == 1, "{why}");
    assert_eq!(count(&told, "+ ComputeDomain/"), 1, "{told}");
    // A new template: nothing beside the old one in the same clique, so the old one goes first.
    let rest = "serve\nrun\nadvance 60\nrun\nset spec.operation {\"restartToken\":\"2\"}\nrun\nwhy";
    let (why, told) = tell(&with_fabric(racks(&[("rack-a", 6)], 1, rest)));
    assert!(told.contains("MakingRoom") && why.contains("CliqueBusy"), "{told}");
    let (why, _) = tell(&with_fabric(racks(&[("rack-a", 6)], 1, &format!("{rest}\nend\nrun\nwhy"))));
    assert!(why.contains("Starting, rack-a"), "{why}");
}

/// OP-082: the marks of an old domain are waited for, not written over.
#[test]
fn nodes_that_still_carry_the_label_of_an_old_compute_domain_are_waited_for() {
    let story =
        racks(&[("rack-a", 2)], 1, "").replacen("cluster typical", "apis computedomain\ncluster typical", 1);
    let before = story.rfind("run\n").expect("the first run");
    let marked =
        format!("{}node rack-a-00 label resource.nvidia.com/computeDomain=old\nrun\n", &story[..before]);
    let (why, _) = tell(&format!("{marked}why\n"));
    assert!(why.contains("Pending, no domain") && why.contains("1 CliqueBusy"), "{why}");
    let cleared = format!("{marked}node rack-a-00 unlabel resource.nvidia.com/computeDomain\nrun\nwhy\n");
    assert!(tell(&cleared).0.contains("Starting, rack-a"));
}

/// What a driver does not take away for five minutes is somebody's work; the nodes are avoided meanwhile.
#[test]
fn a_driver_that_does_not_clean_up_is_named_and_its_nodes_are_avoided() {
    let rest = "serve\nrun\nadvance 60\nrun\ndriver forms\nset spec.operation {\"restartToken\":\"2\"}\n\
                run\ndrained decode\nrun\nend\nrun\nadvance 60\nrun\n";
    let story = racks(&[("rack-a", 2)], 1, rest).replacen(
        "cluster typical",
        "apis computedomain\ncluster typical",
        1,
    );
    let (status, told) = tell(&format!("{story}status\n"));
    assert!(status.contains("FabricCleanup") && status.contains("is not gone"), "{status}");
    assert_eq!(count(&told, "FabricCleanupStuck"), 0, "{told}");
    let (why, told) = tell(&format!("{story}advance 300\nrun\nadvance 60\nrun\nwhy\n"));
    assert_eq!(count(&told, " FabricCleanupStuck: "), 1, "said once\n{told}");
    assert!(why.contains("avoided: Node rack-a-00") && why.contains("Pending"), "{why}");
    // It goes on elsewhere as soon as it can, and there when the driver has done its work at last.
    let (why, _) =
        tell(&format!("{story}advance 300\nrun\nnodes 2 domain rack-b nvidia.com/gpu 4\nrun\nwhy\n"));
    assert!(why.contains("Starting, rack-b"), "{why}");
    let (why, _) = tell(&format!("{story}driver cleans\nrun\nwhy\n"));
    assert!(why.contains("Starting, rack-a"), "{why}");
}

/// OP-086: who waits says for what, and after a while that a person must look.
#[test]
fn a_supernode_that_waits_names_its_reason_and_stalls_the_cluster_after_a_while() {
    let full =
        racks(&[("rack-a", 2)], 1, "").replacen("cluster typical", "node rack-a cordon\ncluster typical", 1);
    let (status, _) = tell(&format!("{full}advance 60\nrun\nstatus\n"));
    assert!(status.contains("Cordoned") && status.contains("Stalled=False"), "{status}");
    let (status, told) = tell(&format!("{full}advance 1000\nrun\nrun\nstatus\n"));
    assert!(status.contains("Stalled=True Unplaceable"), "{status}");
    assert_eq!(count(&told, " Unplaceable: "), 1, "said once as an event\n{told}");
    let two = full.replace("set spec.decode.replicas 1", "set spec.decode.replicas 2");
    let (_, told) = tell(&format!("{two}advance 1000\nrun\nadvance 60\nrun\n"));
    assert_eq!(count(&told, " Unplaceable: "), 2, "once each, then the plans rest\n{told}");
}

/// OP-134: what is avoided is visible, and for a while only.
#[test]
fn quarantine_after_three_failures_is_shown_and_expires() {
    let mut rest = String::from("serve prefill\nrun\n");
    for _ in 0..3 {
        rest += "fail -00 DeviceUnhealthy\nrun\nend\nadvance 100\nrun\n";
    }
    let rest = rest.replace("fail -00", "fail decode-PLACEHOLDER");
    // Names are drawn by the story's seed, in this order.
    let rest = ["54drk", "bg9hd", "2l6tc"]
        .iter()
        .fold(rest, |rest, name| rest.replacen("PLACEHOLDER", &format!("{name}-00"), 1));
    let (why, _) = tell(&racks(&[("rack-a", 3)], 1, &format!("{rest}why")));
    assert!(why.contains("avoided: Node rack-a-00") && why.contains("on rack-a-01, rack-a-02"), "{why}");
    let (why, _) = tell(&racks(&[("rack-a", 3)], 1, &format!("{rest}serve\nrun\nadvance 22000\nrun\nwhy")));
    assert!(!why.contains("avoided"), "{why}");
}
