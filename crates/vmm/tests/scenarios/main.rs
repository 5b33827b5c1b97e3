//! The contract of a range of addresses, as scenarios that run over every driver, under every failing driver call.
//!
//! Over the simulated device and over this machine's memory they run wherever tests do. Over a GPU they are ignored tests
//! of the same binary, which needs no file but itself: `scenarios-* --ignored --test-threads 1`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)]

mod addresses;
mod calls;
mod chance;
mod faults;
mod gpu;
mod ground;
mod model;
mod pressure;
mod real;
mod runner;
mod scenario;
mod setup;
mod threads;
mod told;
