//! Ranks with memory of their own, and who coordinates them, in one process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvcached_ipc::message::Member;
use kvcached_ipc::{Directory, FTensorStore, RankServer, Ranks, RanksConfig};
use kvcached_pool::{Layout, Mapper, Meter, PageOrder, Pool, PoolConfig, PoolError};
use kvcached_vmm::{Device, Driver, FTensor, Geometry, Options, Shape, Target};

pub const PAGES: u32 = 6;
/// Blocks of a page.
pub const M: u32 = 4;

/// Ranks and who coordinates them, of one process.
pub struct Engine {
    pub tensors: Vec<Arc<FTensor>>,
    pub servers: Vec<RankServer>,
    pub ranks: Arc<Ranks>,
    _base: tempfile::TempDir,
}

pub fn tensor(driver: Arc<dyn Driver>) -> Arc<FTensor> {
    let granularity = driver.granularity();
    let target = Target { page_bytes: Some(granularity), ..Target::new(granularity) };
    let geometry = Geometry::solve(Shape::new(1, granularity / u64::from(M), 1), target).unwrap();
    Arc::new(FTensor::reserve(driver, geometry, u64::from(PAGES * M), Options::default()).unwrap())
}

impl Engine {
    pub fn new(tensors: Vec<Arc<FTensor>>) -> Self {
        let base = tempfile::tempdir().unwrap();
        let directory = Directory::create(&base.path().join("d")).unwrap();
        let mut addresses: Vec<(Member, PathBuf)> = vec![];
        let mut servers = vec![];
        for (number, tensor) in tensors.iter().enumerate() {
            // Two stages, so that both numbers count.
            let member = Member { stage: number as u16 / 2, rank: number as u16 % 2 };
            let server = RankServer::bind(member, &directory).unwrap();
            server.add_group(3, Arc::new(FTensorStore::new(Arc::clone(tensor)))).unwrap();
            addresses.push((member, server.address().to_path_buf()));
            servers.push(server);
        }
        let config = RanksConfig { group: 3, epoch: 1, keep: vec![], timeout: Duration::from_secs(10) };
        let ranks = Arc::new(Ranks::connect(&addresses, config).unwrap());
        Engine { tensors, servers, ranks, _base: base }
    }

    pub fn on_host(ranks: usize) -> Self {
        Self::new((0..ranks).map(|_| tensor(kvcached_vmm::open(Device::Host).unwrap())).collect())
    }

    pub fn pool(&self, config: PoolConfig, meter: Arc<dyn Meter>) -> Result<Pool, PoolError> {
        Pool::new(config, Arc::clone(&self.ranks) as Arc<dyn Mapper>, meter)
    }

    /// The pages of all ranks, which are the same.
    #[track_caller]
    pub fn mapped(&self) -> Vec<u32> {
        let mapped: Vec<_> = self.tensors.iter().map(|tensor| tensor.mapped_pages()).collect();
        assert!(mapped.windows(2).all(|pair| pair[0] == pair[1]), "{mapped:?}");
        mapped[0].clone()
    }
}

/// Pages of [`M`] blocks, nothing kept in reserve.
pub fn config() -> PoolConfig {
    PoolConfig {
        layout: Layout {
            num_blocks: PAGES * M,
            blocks_per_page: M,
            ids_per_page: M,
            order: PageOrder::LowestFirst,
        },
        null_block: false,
        async_sched: false,
        min_reserved_bytes: 0,
        max_reserved_bytes: 0,
        patience: PoolConfig::PATIENCE,
    }
}
