//! How fast, how large, how quiet the operator is, with a real control plane and pretend nodes:
//! `cargo bench -p deepinfer-e2e --bench operator -- --help`.
//!
//! Everything runs on one machine, so the API server, the scheduler and kwok are in the figures of time; memory and CPU
//! are the operator's own.

mod args;
mod figures;
mod points;
mod world;

use anyhow::Result;
use clap::Parser as _;

use self::args::Args;
use self::world::World;

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        if deepinfer_controlplane::skipped() {
            return Ok(());
        }
        println!("{}", figures::machine());
        if args.only("supernode") {
            points::supernode(&args).await?;
        }
        if args.only("curve") {
            for &clusters in &args.clusters {
                points::curve(&args, clusters).await?;
            }
        }
        if args.only("failover") {
            points::failover(&args).await?;
        }
        Ok(())
    })
}
