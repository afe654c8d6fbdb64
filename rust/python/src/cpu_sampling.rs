//! Sampling on the CPU for Python: checks array types, borrows their memory and calls `cbrs_cpu` without the GIL.

use cbrs_cpu::Kernels;
use cbrs_cpu::sampling::{
    Bans, Bias, LogprobArgs, Penalties, Ragged, RowLogits, SampleArgs, SampleInput, SamplingParameters,
};
use numpy::ndarray::{Ix1, Ix2};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray, PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::cpu_arrays::{at_least_1, read, slice, value_error};

/// `temperature`, `top_k`, `top_p`, `min_p`.
pub(crate) type ParameterArrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);
/// `presence`, `frequency`, `repetition`, then `history`: ids, `start`, `length`, `num_prompt`.
pub(crate) type PenaltyArrays<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);
/// ids, values, `start`, `length`.
pub(crate) type BiasArrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);
/// `start`, ids.
pub(crate) type BanArrays<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);
/// Token and error of each sample.
pub(crate) type Samples<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<u8>>);
/// Token ids, values, ranks.
pub(crate) type LogprobMatrix<'py> = (Bound<'py, PyArray2<i32>>, Bound<'py, PyArray2<f32>>, Bound<'py, PyArray1<i32>>);

/// Logits and the rows of them that are meant.
pub(crate) struct Logits<'py> {
    data: PyReadonlyArray<'py, f32, Ix2>,
    index: PyReadonlyArray<'py, i32, Ix1>,
    vocab_size: usize,
}

impl<'py> Logits<'py> {
    pub(crate) fn new(logits: &Bound<'py, PyAny>, index: &Bound<'py, PyAny>, vocab_size: i64) -> PyResult<Self> {
        Ok(Self {
            data: read(logits, "logits")?,
            index: read(index, "logits_index")?,
            vocab_size: at_least_1(vocab_size, "vocab_size")?,
        })
    }

    fn get(&self) -> PyResult<RowLogits<'_>> {
        Ok(RowLogits {
            data: slice(&self.data, "logits")?,
            row_len: self.data.shape()[1],
            vocab_size: self.vocab_size,
            index: slice(&self.index, "logits_index")?,
        })
    }
}

/// What belongs to samples and rows besides the logits.
pub(crate) struct Sampling<'py> {
    pub(crate) rows: Bound<'py, PyAny>,
    pub(crate) uniform: Bound<'py, PyAny>,
    pub(crate) parameters: ParameterArrays<'py>,
    pub(crate) penalties: Option<PenaltyArrays<'py>>,
    pub(crate) bias: Option<BiasArrays<'py>>,
    pub(crate) bans: Option<BanArrays<'py>>,
}

/// Tokens and errors of the samples.
pub(crate) fn sample<'py>(
    py: Python<'py>,
    kernels: &Kernels,
    logits: &Logits<'py>,
    sampling: &Sampling<'py>,
) -> PyResult<Samples<'py>> {
    let rows = vector(&sampling.rows, "rows")?;
    let uniform = vector(&sampling.uniform, "uniform")?;
    let (temperature, top_k, top_p, min_p) = &sampling.parameters;
    let (temperature, top_k) = (vector(temperature, "temperature")?, vector(top_k, "top_k")?);
    let (top_p, min_p) = (vector(top_p, "top_p")?, vector(min_p, "min_p")?);
    let penalties = sampling.penalties.as_ref().map(Penalised::new).transpose()?;
    let bias = sampling.bias.as_ref().map(Biased::new).transpose()?;
    let bans =
        sampling.bans.as_ref().map(|(start, ids)| Ok::<_, PyErr>((vector(start, "bans start")?, vector(ids, "bans")?)));
    let bans = bans.transpose()?;
    let input = SampleInput {
        logits: logits.get()?,
        rows: of(&rows, "rows")?,
        uniform: of(&uniform, "uniform")?,
        parameters: SamplingParameters {
            temperature: of(&temperature, "temperature")?,
            top_k: of(&top_k, "top_k")?,
            top_p: of(&top_p, "top_p")?,
            min_p: of(&min_p, "min_p")?,
        },
        penalties: penalties.as_ref().map(Penalised::get).transpose()?,
        bias: bias.as_ref().map(Biased::get).transpose()?,
        bans: match &bans {
            Some((start, ids)) => Some(Bans { start: of(start, "bans start")?, ids: of(ids, "bans")? }),
            None => None,
        },
    };
    let (mut tokens, mut errors) = (vec![0; input.logits.index.len()], vec![0; input.logits.index.len()]);
    let args = SampleArgs { tokens: &mut tokens, errors: &mut errors, input };
    py.detach(|| kernels.sample(args)).map_err(value_error)?;
    Ok((PyArray1::from_vec(py, tokens), PyArray1::from_vec(py, errors)))
}

/// Log-probabilities of the tokens `targets`.
pub(crate) fn logprobs<'py>(
    py: Python<'py>,
    kernels: &Kernels,
    logits: &Logits<'py>,
    targets: &Bound<'py, PyAny>,
    num_logprobs: &Bound<'py, PyAny>,
) -> PyResult<LogprobMatrix<'py>> {
    let (targets, num_logprobs) = (vector(targets, "targets")?, vector::<i32>(num_logprobs, "num_logprobs")?);
    let (targets, num_logprobs) = (of(&targets, "targets")?, of(&num_logprobs, "num_logprobs")?);
    let most = num_logprobs.iter().copied().max().unwrap_or(0);
    // Bounds the memory that a wrong count could ask for; the kernel refuses one beyond it.
    let columns = 1 + usize::try_from(most).unwrap_or(0).min(MAX_COLUMNS);
    let num_tokens = logits.index.len();
    let mut token_ids = vec![0; num_tokens * columns];
    let mut values = vec![0.0; num_tokens * columns];
    let mut ranks = vec![0; num_tokens];
    let args = LogprobArgs {
        token_ids: &mut token_ids,
        values: &mut values,
        ranks: &mut ranks,
        columns,
        logits: logits.get()?,
        targets,
        num_logprobs,
    };
    py.detach(|| kernels.logprobs(args)).map_err(value_error)?;
    let shape = [num_tokens, columns];
    let token_ids = PyArray1::from_vec(py, token_ids).reshape(shape)?;
    let values = PyArray1::from_vec(py, values).reshape(shape)?;
    Ok((token_ids, values, PyArray1::from_vec(py, ranks)))
}

/// Most likely ids that are reported at most.
const MAX_COLUMNS: usize = 1024;

struct Penalised<'py> {
    by_row: [PyReadonlyArray1<'py, f32>; 3],
    history: PyReadonlyArray1<'py, i32>,
    places: [PyReadonlyArray1<'py, i64>; 3],
}

impl<'py> Penalised<'py> {
    fn new(arrays: &PenaltyArrays<'py>) -> PyResult<Self> {
        let (presence, frequency, repetition, history, start, len, num_prompt) = arrays;
        Ok(Self {
            by_row: [
                vector(presence, "presence_penalty")?,
                vector(frequency, "frequency_penalty")?,
                vector(repetition, "repetition_penalty")?,
            ],
            history: vector(history, "history")?,
            places: [
                vector(start, "history start")?,
                vector(len, "history length")?,
                vector(num_prompt, "num_prompt")?,
            ],
        })
    }

    fn get(&self) -> PyResult<Penalties<'_>> {
        let [presence, frequency, repetition] = &self.by_row;
        let [start, len, num_prompt] = &self.places;
        Ok(Penalties {
            presence: of(presence, "presence_penalty")?,
            frequency: of(frequency, "frequency_penalty")?,
            repetition: of(repetition, "repetition_penalty")?,
            history: Ragged {
                values: of(&self.history, "history")?,
                start: of(start, "history start")?,
                len: of(len, "history length")?,
            },
            num_prompt: of(num_prompt, "num_prompt")?,
        })
    }
}

struct Biased<'py> {
    ids: PyReadonlyArray1<'py, i32>,
    values: PyReadonlyArray1<'py, f32>,
    start: PyReadonlyArray1<'py, i64>,
    len: PyReadonlyArray1<'py, i64>,
}

impl<'py> Biased<'py> {
    fn new((ids, values, start, len): &BiasArrays<'py>) -> PyResult<Self> {
        Ok(Self {
            ids: vector(ids, "bias ids")?,
            values: vector(values, "bias values")?,
            start: vector(start, "bias start")?,
            len: vector(len, "bias length")?,
        })
    }

    fn get(&self) -> PyResult<Bias<'_>> {
        let ids = Ragged {
            values: of(&self.ids, "bias ids")?,
            start: of(&self.start, "bias start")?,
            len: of(&self.len, "bias length")?,
        };
        Ok(Bias { ids, values: of(&self.values, "bias values")? })
    }
}

fn vector<'py, T: numpy::Element>(array: &Bound<'py, PyAny>, name: &str) -> PyResult<PyReadonlyArray1<'py, T>> {
    read::<T, Ix1>(array, name)
}

fn of<'a, T: numpy::Element>(array: &'a PyReadonlyArray1<'_, T>, name: &str) -> PyResult<&'a [T]> {
    slice(array, name)
}
