//! The command line.

use std::path::PathBuf;

use clap::{ColorChoice, Parser, Subcommand};

/// Shows the engines of this user whose KV cache is elastic
#[derive(Debug, Parser)]
#[command(name = "kvctl", version, color = ColorChoice::Never, after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Directory of instance records
    #[arg(long, global = true, hide = true, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show all running instances
    #[command(after_help = EXIT_CODES)]
    List {
        /// Print JSON; sizes in bytes
        #[arg(long)]
        json: bool,
    },
}

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 something failed, 2 bad usage. Warnings go to standard error.";
