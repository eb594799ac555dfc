//! The engines of `examples/` run, crash, and come back with their state.
#![expect(
    clippy::duplicate_mod,
    reason = "each example is a program of its own, and has the job as a module"
)]

macro_rules! examples {
    ($($name:ident in $path:literal,)*) => {
        $(
            #[path = $path]
            #[expect(dead_code, reason = "its main runs the same in another directory")]
            mod $name;
        )*

        $(
            #[test]
            fn $name() {
                let dir = tempfile::tempdir().unwrap();
                $name::run(dir.path()).unwrap();
            }
        )*
    };
}

examples! {
    embed_threads in "../examples/embed_threads.rs",
    embed_tokio in "../examples/embed_tokio.rs",
    embed_thread_per_core in "../examples/embed_thread_per_core.rs",
}
