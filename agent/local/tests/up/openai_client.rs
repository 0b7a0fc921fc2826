//! The official `openai` client for Python against the running product.

use std::path::Path;
use std::process::Command;

use crate::harness::{Spec, Up, root};

/// A Python with the client, made on first use and shared with the gateway's test.
fn python() -> std::path::PathBuf {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openai-client");
    let python = home.join("bin/python");
    let has_client = Command::new(&python).args(["-c", "import openai"]).output();
    if !has_client.is_ok_and(|output| output.status.success()) {
        let run =
            |command: &mut Command| assert!(command.status().expect("it runs").success(), "{command:?}");
        run(Command::new("python3").args(["-m", "venv"]).arg(&home));
        let requirements = root().join("agent/gateway/tests/python/requirements.txt");
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(requirements));
    }
    python
}

#[test]
#[ignore = "installs the openai package; run with --ignored"]
fn the_official_client_passes_its_conformance_script_against_the_product() {
    let up = Up::start(&Spec { ranks: 2, ..Spec::shipped() });
    let script = root().join("agent/gateway/tests/python/conformance.py");
    let url = format!("http://{}/v1", up.host);
    let output = Command::new(python()).arg(script).args(["--base-url", &url, "--model", "tiny"]).output();
    let output = output.expect("python runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}{}", String::from_utf8_lossy(&output.stderr), up.log());
    assert!(said.ends_with("all passed\n"), "{said}");
}
