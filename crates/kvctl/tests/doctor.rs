//! `doctor`: whose Python it is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;

const PYTHONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pythons");

/// Exit code, standard output, standard error of the real program.
fn kvctl(args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvctl"));
    command.args(args).env_remove("KVCACHED_PYTHON").envs(env.iter().copied());
    let ended = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code().unwrap(), text(ended.stdout), text(ended.stderr))
}

#[test]
fn the_python_is_the_one_that_is_named() {
    let (stand_in, path) =
        (format!("{PYTHONS}/python3"), format!("{PYTHONS}:{}", std::env::var("PATH").unwrap()));
    let asked = (0, "asked: vllm --json\n".to_owned(), String::new());
    let args = ["doctor", "vllm", "--json"];
    assert_eq!(kvctl(&args, &[("PATH", &path)]), asked);
    assert_eq!(kvctl(&args, &[("PATH", "/nowhere"), ("KVCACHED_PYTHON", &stand_in)]), asked);
    let named = ["doctor", "--python", &stand_in, "vllm", "--json"];
    assert_eq!(kvctl(&named, &[("PATH", "/nowhere"), ("KVCACHED_PYTHON", "/nowhere/python")]), asked);
    let missing = |python: &str| {
        format!(
            "error: cannot run {python}: No such file or directory (os error 2); \
             give the Python that runs the engines: kvctl doctor --python PATH, or KVCACHED_PYTHON\n"
        )
    };
    let failed = |python| (1, String::new(), missing(python));
    assert_eq!(kvctl(&args, &[("PATH", "/nowhere")]), failed("python3"));
    assert_eq!(kvctl(&args, &[("KVCACHED_PYTHON", "/nowhere/python")]), failed("/nowhere/python"));
}

#[test]
fn a_kvcached_without_a_doctor_is_not_ours() {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("kvcached")).unwrap();
    std::fs::write(home.path().join("kvcached/__init__.py"), "").unwrap();
    let (code, out, err) = kvctl(&["doctor"], &[("PYTHONPATH", home.path().to_str().unwrap())]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(
        err.starts_with("error: python3 has no kvcached with a doctor; install the wheel there"),
        "{err}"
    );
}
