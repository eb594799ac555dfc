//! Credentials for tests by the environment, which is where a program has them, without changing the environment of the
//! tests that run beside.

use std::env;
use std::process::Command;

use crate::server::{ACCESS_KEY, SECRET_KEY};

/// Set in the process that runs one test with credentials.
const MARK: &str = "TIDELOG_TESTING_CREDENTIALS";

/// Runs `inner` in a process that has the test server's credentials in its environment and no others: the calling test,
/// whose name with its modules is `test`, runs again in a process of its own, and there `inner` runs.
///
/// # Panics
/// The test fails there, or there is no such test.
pub fn with_credentials(test: &str, inner: impl FnOnce()) {
    if env::var_os(MARK).is_some() {
        return inner();
    }
    let program = env::current_exe().expect("a test knows its program");
    let mut command = Command::new(program);
    command.args(["--exact", test, "--nocapture", "--include-ignored"]);
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("AWS_") {
            command.env_remove(name);
        }
    }
    let output = command
        .env(MARK, "1")
        .env("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("AWS_CONFIG_FILE", "/dev/null")
        .env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        .output()
        .expect("a process can be started");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} fails with credentials:\n{said}");
    assert!(said.contains("1 passed"), "there is no test {test}:\n{said}");
}
