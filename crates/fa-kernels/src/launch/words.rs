//! What a pass hands to the GPU, as words: launches, parameters, tensor maps. Names of types and fields are
//! not among them: versions of the library that launch alike give the same words.

use fa_core::{Strides, TensorLayout};

use crate::jit::declare::DeviceType;
use crate::launch::append::AppendLaunch;
use crate::launch::args::RawTensor;
use crate::launch::extras::RawExtras;
use crate::launch::launches::{Addresses, Launch, Launches, Params, Step};
use crate::launch::merge::{MergeLaunch, RawMergeArgs, RawPartialResult};

/// Distance between the placeholder addresses of tensors and workspace.
const APART: u64 = 1 << 40;

impl Launches {
    /// The words of a call whose tensors have these strides, in the order of [`Launches::tensors`], at
    /// placeholder addresses.
    pub fn words(&self, strides: &[Strides]) -> Vec<u64> {
        let tensors: Vec<RawTensor> =
            (1..).zip(strides).map(|(i, &strides)| RawTensor { address: i * APART, strides }).collect();
        let workspace = (self.workspace.bytes > 0).then_some(200 * APART);
        let at =
            Addresses { tensors: &tensors, lse: Some(100 * APART), workspace, extras: RawExtras::default() };
        let mut words = vec![self.workspace.bytes as u64, self.plan_bytes as u64];
        for extra in &self.extras {
            text(extra.name, &mut words);
            words.extend([extra.len as u64, u64::from(extra.is_optional)]);
        }
        for step in &self.steps {
            match step {
                Step::Clear(part) => words.extend([1, part.offset as u64, part.bytes as u64]),
                Step::ClearGradient => words.push(4),
                Step::Plan(launch) => self.launch(2, launch, &mut words),
                Step::Launch(launch) => self.launch(3, launch, &mut words),
            }
        }
        let params = self.params(&at);
        match &params {
            Params::Forward(own) => own.params.words(&mut words),
            Params::Backward(own) => own.params.words(&mut words),
        }
        if self.program.is_some() {
            let (program, map) = params.program();
            program.words(&mut words);
            map.words(&mut words);
        }
        for map in self.maps(&at) {
            let shape = map.shape;
            words.extend([map.address, shape.rank as u64]);
            words.extend(shape.dims.iter().chain(&shape.strides));
            words.extend(shape.tile.map(u64::from));
        }
        words
    }

    /// The entries that a call without a plan of its own launches.
    pub fn entries(&self) -> impl Iterator<Item = &'static str> {
        self.steps.iter().filter_map(|step| match step {
            Step::Clear(_) | Step::ClearGradient => None,
            Step::Plan(_) if self.plans_for_itself() => None,
            Step::Plan(launch) | Step::Launch(launch) => Some(launch.entry),
        })
    }

    fn launch(&self, kind: u64, launch: &Launch, words: &mut Vec<u64>) {
        let Launch { entry, grid, threads, smem, cluster, takes_maps, starts_early } = *launch;
        text(entry, words);
        words.extend([kind, grid.into(), threads.into(), smem.into(), cluster.into()]);
        words.extend([takes_maps, starts_early].map(u64::from));
    }
}

impl AppendLaunch {
    /// The words of a call, without addresses and strides.
    pub fn words(&self) -> Vec<u64> {
        let mut words = vec![self.grid.into(), self.threads.into(), self.smem.into()];
        self.params.words(&mut words);
        words
    }
}

impl MergeLaunch {
    /// The words of a call of packed tensors at placeholder addresses.
    pub fn words(&self) -> Vec<u64> {
        let [_, seqlen, heads, dim] = self.merge().shape();
        let strides = TensorLayout::Bshd.strides(seqlen, heads, dim);
        let raw = |i: usize| RawTensor { address: (1 + i as u64) * APART, strides };
        let part = |i| RawPartialResult { out: raw(i), lse: (100 + i as u64) * APART };
        let parts: Vec<RawPartialResult> = (0..self.merge().parts).map(part).collect();
        let sinks = self.merge().sinks.then_some(200 * APART);
        let args = RawMergeArgs { parts: &parts, out: raw(50), lse: Some(201 * APART), sinks };
        let mut words = vec![self.grid.into(), self.threads.into()];
        self.params(&args).words(&mut words);
        words
    }
}

fn text(text: &str, words: &mut Vec<u64>) {
    words.push(text.len() as u64);
    words.extend(text.bytes().map(u64::from));
}
