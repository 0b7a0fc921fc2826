//! Every write of a cluster's whole life goes wrong once, in each way in which it can.

use std::time::Duration;

use anyhow::{Result, ensure};
use deepinfer_controlplane::proxy::{On, Verb, What, Which};
use serde_json::{Value, json};

use super::rig::{CLUSTER, Rig, cluster, run};
use super::snapshot;

/// What there is of a cluster at two stations of its life: serving, edited.
pub type Life = [Vec<String>; 2];

/// Create, serve, edit (a second supernode), delete: the same as `expected`, if that is known.
async fn live(rig: &Rig, expected: Option<&Life>) -> Result<Life> {
    let station = async |name: &str, expected: Option<&Vec<String>>| {
        rig.ready(CLUSTER).await?;
        match expected {
            Some(expected) => snapshot::reaches(rig, name, expected).await.map(|()| expected.clone()),
            None => snapshot::settled(rig).await,
        }
    };
    rig.apply(&cluster(CLUSTER, 1)).await?;
    let served = station("serving", expected.map(|life| &life[0])).await?;
    rig.apply(&cluster(CLUSTER, 2)).await?;
    let edited = station("edited", expected.map(|life| &life[1])).await?;
    rig.delete(CLUSTER).await?;
    rig.gone(CLUSTER).await?;
    Ok([served, edited])
}

/// The life of a cluster to which nothing happens; made once.
pub async fn undisturbed(rig: &mut Rig) -> Result<Life> {
    static LIFE: tokio::sync::OnceCell<Life> = tokio::sync::OnceCell::const_new();
    let life = LIFE.get_or_try_init(async || {
        let operator = rig.operator().await?;
        let life = live(rig, None).await?;
        operator.kill9();
        rig.forget_lease().await?;
        rig.proxy.reset();
        Ok::<_, anyhow::Error>(life)
    });
    Ok(life.await?.clone())
}

/// A life in which the first try of every write goes wrong.
async fn disturbed(mut rig: Rig, what: What) -> Result<()> {
    let expected = undisturbed(&mut rig).await?;
    let fault = rig.proxy.inject(On::writes(), Which::FirstOfEach, what);
    let operator = rig.operator().await?;
    live(&rig, Some(&expected)).await?;
    let (writes, hit) = rig.proxy.figures(fault);
    println!("  {what:?}: {hit} of {writes} writes went wrong");
    ensure!(hit >= 20, "only {hit} writes were hit");
    ensure!(operator.exit_status().is_none(), "the operator ended");
    Ok(())
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn every_write_is_refused_once_with_409() {
    run("409 at every write", |rig| disturbed(rig, What::status(409)));
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn every_write_is_refused_once_with_429_and_a_time_to_wait() {
    run("429 at every write", |rig| disturbed(rig, What::too_many(1)));
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn every_write_is_refused_once_with_500() {
    run("500 at every write", |rig| disturbed(rig, What::status(500)));
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn every_write_is_refused_once_with_503() {
    run("503 at every write", |rig| disturbed(rig, What::status(503)));
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn every_write_is_dropped_once() {
    run("connection closed at every write", |rig| disturbed(rig, What::Drop));
}

#[test]
fn the_answer_of_every_write_is_lost_once() {
    run("answer lost at every write", |rig| disturbed(rig, What::LoseAnswer));
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn every_write_runs_into_a_time_out_once() {
    run("time-out at every write", |rig| disturbed(rig, What::Silence));
}

/// Drawn from the proxy's seed: all faults at once, on reads too.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_bad_day() {
    run("a bad day", async |mut rig: Rig| {
        let expected = undisturbed(&mut rig).await?;
        let operator = rig.operator().await?;
        for (on, p, what) in [
            (On::writes(), 0.1, What::status(409)),
            (On::writes(), 0.1, What::status(500)),
            (On::writes(), 0.1, What::LoseAnswer),
            (On::writes(), 0.05, What::Drop),
            (On::writes(), 0.03, What::Silence),
            (On::verbs(&[Verb::Get, Verb::List]), 0.2, What::status(500)),
            (On::any(), 0.1, What::Delay(Duration::from_millis(200))),
        ] {
            rig.proxy.inject(on, Which::Probability(p), what);
        }
        live(&rig, Some(&expected)).await?;
        ensure!(operator.exit_status().is_none(), "the operator ended");
        Ok(())
    });
}

/// A namespace that goes away with everything in it: no drain holds it up, no object is left, and the operator does not
/// write into the void.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_namespace_deleted_under_the_operator_goes() {
    run("namespace deleted", async |mut rig: Rig| {
        let operator = rig.operator().await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        rig.agents.script(
            "*",
            deepinfer_controlplane::pretend::Script::busy(3, deepinfer_controlplane::pretend::Drains::Never),
        );
        rig.drop_namespace().await?;
        let namespaces: kube::Api<k8s_openapi::api::core::v1::Namespace> = kube::Api::all(rig.client.clone());
        super::rig::until(super::rig::PATIENCE, async || {
            Ok(namespaces.get_opt(&rig.namespace).await?.is_none().then_some(()))
        })
        .await?;
        rig.proxy.reset();
        tokio::time::sleep(Duration::from_secs(3)).await;
        let writes = rig.proxy.log(&On::writes().not("events"));
        ensure!(writes.len() <= 2, "writes after the namespace has gone: {writes:#?}");
        ensure!(operator.exit_status().is_none(), "the operator ended");
        Ok(())
    });
}

/// OP-017: nothing that is only not there yet is an error.
#[test]
fn a_first_install_logs_no_errors() {
    run("OP-017", async |mut rig: Rig| {
        let operator = rig.operator().await?;
        rig.apply(&cluster(CLUSTER, 2)).await?;
        rig.ready(CLUSTER).await?;
        let errors: Vec<Value> = operator.log_lines("ERROR");
        ensure!(errors.is_empty(), "{errors:#?}");
        Ok(())
    });
}

/// OP-038, OP-040: a first install makes exactly the supernodes that are wanted, and one that has no room holds nothing.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_supernode_without_room_holds_no_accelerators() {
    run("OP-040", async |mut rig: Rig| {
        let operator = rig.operator().await?;
        // 16 nodes: one for the prefill worker, two for each supernode.
        let mut wide = cluster(CLUSTER, 3);
        wide["spec"]["decode"]["supernode"]["nodes"] = json!(6);
        rig.apply(&wide).await?;
        let waits = super::rig::until(super::rig::PATIENCE, async || {
            let all = rig.supernodes().await?;
            let serving = all.iter().filter(|sn| sn.data["status"]["phase"] == "Serving").count();
            let status = rig.api("DeepInferCluster").get(CLUSTER).await?.data["status"].clone();
            let waiting = status["waiting"].as_array().is_some_and(|waiting| !waiting.is_empty());
            Ok((serving == 2 && waiting).then_some(status))
        });
        let status = waits.await?;
        let pods =
            rig.pods().list(&kube::api::ListParams::default().labels("deepinfer.io/supernode")).await?;
        let bound = pods.items.iter().filter(|pod| pod.spec.as_ref().is_some_and(|s| s.node_name.is_some()));
        ensure!(bound.count() == 12, "supernodes hold other nodes than those of two: {status:#}");
        ensure!(rig.incarnations().len() <= 3, "{:?}", rig.incarnations());
        operator.kill9();
        Ok(())
    });
}
