//! The command line.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ColorChoice, Parser, Subcommand};

use crate::size::{self, Percentage};
use crate::wish::Wish;

/// Shows and steers the engines of this user whose KV cache is elastic
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
    /// Show all running instances, and the memory budget that they share
    #[command(after_help = EXIT_CODES)]
    List {
        /// Print JSON; sizes in bytes
        #[arg(long)]
        json: bool,
    },
    /// Set the most memory that an instance may have
    #[command(after_help = EXIT_CODES)]
    Limit {
        /// Name of the instance
        name: String,
        /// Binary units: 512M, 1.5GiB; 0 drains the instance, none takes the limit away
        #[arg(value_name = "SIZE|none", value_parser = |text: &str| size::size_or_none(text).map(Wish::Limit))]
        limit: Wish,
        #[command(flatten)]
        answer: Answer,
    },
    /// Set the limit of an instance in percent of the memory budget of its device
    #[command(after_help = EXIT_CODES)]
    LimitPercent {
        /// Name of the instance
        name: String,
        /// From 0 to 100: 25, 12.5
        #[arg(value_name = "PCT", value_parser = size::percentage)]
        percentage: Percentage,
        #[command(flatten)]
        answer: Answer,
    },
    /// Set the memory that an instance is guaranteed, whether it uses it or not
    #[command(after_help = EXIT_CODES)]
    Min {
        /// Name of the instance
        name: String,
        /// Binary units: 512M, 1.5GiB; 0 guarantees nothing
        #[arg(value_name = "SIZE", value_parser = |text: &str| size::size(text).map(Wish::Min))]
        min: Wish,
        #[command(flatten)]
        answer: Answer,
    },
    /// Remove the record of an instance that has died, or one of another version of kvcached
    #[command(after_help = EXIT_CODES)]
    Delete {
        /// Name of the instance
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print what `list` shows whenever it has changed, until interrupted
    #[command(after_help = EXIT_CODES)]
    Watch(Watch),
    /// Print what all instances hold, count and time, as Prometheus takes it
    #[command(after_help = EXIT_CODES)]
    Metrics(Metrics),
    /// Say whether engines' KV caches are elastic here, and if not why and what to do; needs the Python that runs the engines
    #[command(disable_help_flag = true)]
    Doctor {
        /// The Python that runs the engines; default KVCACHED_PYTHON, else that of kvctl's wheel, else python3
        #[arg(long, value_name = "PATH")]
        python: Option<PathBuf>,
        /// See kvctl doctor --help
        #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Show instances and budgets live, and change limits by key
    #[command(visible_alias = "kvtop", after_help = EXIT_CODES)]
    Top {
        /// Seconds between two looks
        #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = size::interval)]
        interval: Duration,
    },
}

/// How an instance's answer is waited for and printed.
#[derive(Debug, clap::Args)]
pub(crate) struct Answer {
    /// How long to wait for the instance's answer
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = size::patience)]
    pub(crate) wait: Duration,
    /// Print JSON; sizes in bytes
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Watch {
    /// Only these instances, and the budgets that they live by; default all
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = size::interval)]
    pub(crate) interval: Duration,
    /// End after this many looks, whether they showed anything new or not
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Print JSON, one object a line; sizes in bytes
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Metrics {
    /// Print JSON; sizes in bytes, times in seconds
    #[arg(long, conflicts_with = "listen")]
    pub(crate) json: bool,
    /// Serve them over HTTP at /metrics until interrupted; on this machine only, unless an address is given: 0.0.0.0:9577
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = address)]
    pub(crate) listen: Option<SocketAddr>,
}

/// A port alone is one of the loopback address.
fn address(text: &str) -> Result<SocketAddr, String> {
    let port = text.parse::<u16>().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    port.or_else(|_| text.parse()).map_err(|_| {
        "write a port, as 9577, or a numeric address and a port, as 0.0.0.0:9577 or [::1]:9577".to_owned()
    })
}

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 something failed, 2 bad usage, 3 asked but not (yet) in force.
Warnings go to standard error.";
