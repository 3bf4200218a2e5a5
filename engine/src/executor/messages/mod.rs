//! Messages between pipeline stages: sends and receives of one program run.
//!
//! Shapes are announced once per boundary. A small message before the first micro-batch carries the number, dtypes and
//! shapes of the tensors, so a stage can post the receives of later micro-batches before they arrive. The first
//! gradients are announced too, with a flag per tensor that tells whether the tensor has a gradient.

mod boundary;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use zero_comm::{Buffer, Communicator, Pending};
use zero_model::Activations;
use zero_partition::{Groups, ShardedState, ZeroError, gpu_copy, gpu_room, gpu_tensor};
use zero_pipeline::{Content, Kind, LayerId, Message, SegmentId, StageId};

pub(crate) use boundary::Boundary;
use boundary::{tensors, with_gradient, words};

use crate::device::tensor;
use crate::error::Error;
use crate::executor::tensor_bytes::{buffer_of, room, storage_of};

/// A posted receive.
enum Expected {
    /// The length in words of an announcement of activations, or the gradient flags.
    Announcement(Pending<Buffer>),
    /// One receive per tensor.
    Tensors(Vec<Pending<Buffer>>),
    Tied(Pending<Buffer>),
}

/// The messages of one rank.
pub(crate) struct Messages {
    groups: Groups,
    /// Device of the message buffers.
    device: Device,
    /// Whether received activations become autograd leaves.
    training: bool,
    /// Boundaries by the layer after them.
    boundaries: HashMap<LayerId, Boundary>,
    expected: HashMap<Message, Expected>,
    sending: BTreeMap<Message, Vec<Pending<Buffer>>>,
}

impl Messages {
    pub(crate) fn new(zero: &ShardedState, training: bool) -> Self {
        let device = if zero.transfers_by_gpu() { zero.model().device().clone() } else { Device::Cpu };
        Self {
            groups: zero.groups().clone(),
            device,
            training,
            boundaries: HashMap::new(),
            expected: HashMap::new(),
            sending: BTreeMap::new(),
        }
    }

    /// Returns the tensors that crossed each boundary.
    pub(crate) fn boundaries(self) -> HashMap<LayerId, Boundary> {
        self.boundaries
    }

    fn comm(&self, kind: Kind) -> Result<Arc<dyn Communicator>, Error> {
        self.groups.pipe(kind).cloned().ok_or_else(|| internal("a program with one pipeline stage sends no messages"))
    }

    /// Starts sending the inputs of the next stage's first layer.
    pub(crate) fn send_activations(&mut self, message: Message, x: &Activations) -> Result<(), Error> {
        let (layer, comm) = (layer_of(&message)?, self.comm(Kind::Activations)?);
        let shapes: Vec<_> = x.tensors().iter().map(|x| (x.dtype(), x.dims().to_vec())).collect();
        // Copy before announcing, so that a tensor that cannot be sent is an error of this rank and not of the
        // receiver.
        let buffers = x.tensors().iter().map(|x| send_buffer(x, &self.device)).collect::<Result<Vec<_>, _>>()?;
        let mut sending = vec![];
        match self.boundaries.get(&layer) {
            Some(known) if known.tensors == shapes => {}
            Some(known) => {
                let what = format!(
                    "the inputs of layer {layer} have the dtypes and shapes {shapes:?}, but an earlier micro-batch had {:?}",
                    known.tensors
                );
                let help = "with pipeline parallelism, all micro-batches of a step must have the same shape";
                return Err(Error::Batch(format!("{what}: {help}")));
            }
            None => {
                let words = words(&shapes);
                sending.push(comm.send(Buffer::I64(vec![words.len() as i64]), message.to));
                sending.push(comm.send(Buffer::I64(words), message.to));
                self.boundaries.insert(layer, Boundary { tensors: shapes, gradients: None });
            }
        }
        sending.extend(buffers.into_iter().map(|buffer| comm.send(buffer, message.to)));
        self.keep(message, sending);
        Ok(())
    }

    /// Starts sending the gradients of this stage's inputs.
    pub(crate) fn send_gradients(&mut self, message: Message, gradients: &[Option<Tensor>]) -> Result<(), Error> {
        let (layer, comm) = (layer_of(&message)?, self.comm(Kind::Gradients)?);
        let boundary = self
            .boundaries
            .get_mut(&layer)
            .ok_or_else(|| internal("cannot send gradients: the stage received no activations for this layer"))?;
        let has: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let mut sending = vec![];
        match &boundary.gradients {
            Some(known) if *known == has => {}
            Some(_) => {
                let what = format!(
                    "in all micro-batches of a step, the same input tensors of layer {layer} must have a gradient"
                );
                return Err(Error::Batch(what));
            }
            None => {
                let flags = has.iter().map(|&has| i64::from(has)).collect();
                sending.push(comm.send(Buffer::I64(flags), message.to));
                boundary.gradients = Some(has);
            }
        }
        for ((dtype, _), gradient) in boundary.tensors.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                sending.push(comm.send(send_buffer(&gradient.to_dtype(*dtype)?, &self.device)?, message.to));
            }
        }
        self.keep(message, sending);
        Ok(())
    }

    /// Starts sending the gradient or the parameters of a tied segment.
    pub(crate) fn send_tied(&mut self, message: Message, buffer: Buffer) -> Result<(), Error> {
        let pending = self.comm(Kind::Tied)?.send(buffer, message.to);
        self.keep(message, vec![pending]);
        Ok(())
    }

    fn keep(&mut self, message: Message, sending: Vec<Pending<Buffer>>) {
        self.sending.insert(message, sending);
    }

    /// Drops the buffers of sends that are complete but not awaited yet, so that only buffers in flight stay in memory.
    /// Returns the buffers of tied gradients. Buffers of tied parameters are kept until they are awaited.
    pub(crate) fn gone(&mut self) -> Result<Vec<Buffer>, Error> {
        let mut gone = vec![];
        for (message, sending) in &mut self.sending {
            let is_kept = matches!(message.content, Content::TiedParameters { .. });
            if !is_kept && sending.iter().all(Pending::is_done) {
                for pending in sending.drain(..) {
                    let buffer = pending.wait()?;
                    if matches!(message.content, Content::TiedGradient { .. }) {
                        gone.push(buffer);
                    }
                }
            }
        }
        Ok(gone)
    }

    /// Waits until a message is sent, and returns its remaining buffers.
    pub(crate) fn await_send(&mut self, message: Message) -> Result<Vec<Buffer>, Error> {
        let sending = self
            .sending
            .remove(&message)
            .ok_or_else(|| internal("cannot wait for a message that this rank has not sent"))?;
        sending.into_iter().map(|pending| Ok(pending.wait()?)).collect()
    }

    /// Posts the receive of a message, or of its announcement.
    pub(crate) fn receive(&mut self, message: Message, zero: &mut ShardedState) -> Result<(), Error> {
        let (kind, from) = (message.content.kind(), message.from);
        let comm = self.comm(kind)?;
        let expected = match message.content {
            Content::Activations { layer, .. } => match self.boundaries.get(&layer) {
                Some(boundary) => Expected::Tensors(posted(&*comm, &self.device, from, boundary.tensors.iter())?),
                None => Expected::Announcement(comm.recv(Buffer::I64(vec![0]), from)),
            },
            Content::Gradients { layer, .. } => match self.boundaries.get(&layer) {
                Some(boundary) => match &boundary.gradients {
                    Some(_) => Expected::Tensors(posted(&*comm, &self.device, from, with_gradient(boundary))?),
                    None => Expected::Announcement(comm.recv(Buffer::I64(vec![0; boundary.tensors.len()]), from)),
                },
                // No activations have crossed the boundary yet, so the number of tensors is unknown: post the receive
                // later, when the message is awaited.
                None => return Ok(()),
            },
            Content::TiedGradient { segment, .. } => {
                Expected::Tied(comm.recv(zero.room_for_tied_gradient(segment), from))
            }
            Content::TiedParameters { segment } => {
                Expected::Tied(comm.recv(zero.room_for_tied_parameters(segment), from))
            }
        };
        self.expected.insert(message, expected);
        Ok(())
    }

    fn expected(&mut self, message: Message, zero: &mut ShardedState) -> Result<Expected, Error> {
        if !self.expected.contains_key(&message) {
            self.receive(message, zero)?;
        }
        self.expected.remove(&message).ok_or_else(|| internal("no receive was posted for the message"))
    }

    /// Waits for the input activations of a layer.
    pub(crate) fn await_activations(
        &mut self,
        message: Message,
        zero: &mut ShardedState,
    ) -> Result<Activations, Error> {
        let (layer, comm) = (layer_of(&message)?, self.comm(Kind::Activations)?);
        let arriving = match self.expected(message, zero)? {
            Expected::Announcement(count) => {
                let count = count.wait()?.into_i64()?;
                let length = count.first().and_then(|&n| usize::try_from(n).ok());
                let length = length.ok_or_else(|| internal("an announcement has an invalid length"))?;
                let words = comm.recv(Buffer::I64(vec![0; length]), message.from).wait()?.into_i64()?;
                let tensors =
                    tensors(&words).ok_or_else(|| internal("cannot decode the announced dtypes and shapes"))?;
                let arriving = posted(&*comm, &self.device, message.from, tensors.iter())?;
                self.boundaries.insert(layer, Boundary { tensors, gradients: None });
                arriving
            }
            Expected::Tensors(arriving) => arriving,
            Expected::Tied(_) => {
                return Err(internal("expected activations, but the posted receive is for a tied segment"));
            }
        };
        let (boundary, device) = (&self.boundaries[&layer], zero.model().device().clone());
        let made = arriving.into_iter().zip(&boundary.tensors).map(|(pending, (dtype, dims))| {
            arrived(&device, pending.wait()?, *dtype, dims, self.training && dtype.is_float())
        });
        Ok(Activations::new(made.collect::<Result<_, Error>>()?))
    }

    /// Waits for the gradients of this stage's output activations.
    pub(crate) fn await_gradients(
        &mut self,
        message: Message,
        zero: &mut ShardedState,
    ) -> Result<Vec<Option<Tensor>>, Error> {
        let (layer, comm) = (layer_of(&message)?, self.comm(Kind::Gradients)?);
        let (expected, device) = (self.expected(message, zero)?, zero.model().device().clone());
        let boundary = self
            .boundaries
            .get_mut(&layer)
            .ok_or_else(|| internal("cannot receive gradients: the stage sent no activations for this layer"))?;
        let arriving = match expected {
            Expected::Announcement(flags) => {
                let flags = flags.wait()?.into_i64()?;
                boundary.gradients = Some(flags.iter().map(|&flag| flag != 0).collect());
                posted(&*comm, &self.device, message.from, with_gradient(boundary))?
            }
            Expected::Tensors(arriving) => arriving,
            Expected::Tied(_) => {
                return Err(internal("expected gradients, but the posted receive is for a tied segment"));
            }
        };
        let mut arriving = arriving.into_iter();
        let has = boundary.gradients.clone().unwrap_or_default();
        let made = boundary.tensors.iter().zip(has).map(|((dtype, dims), has)| match has {
            false => Ok(None),
            true => {
                let pending =
                    arriving.next().ok_or_else(|| internal("fewer gradients arrived than the announcement lists"))?;
                arrived(&device, pending.wait()?, *dtype, dims, false).map(Some)
            }
        });
        made.collect()
    }

    /// Waits for the gradient or the parameters of a tied segment.
    pub(crate) fn await_tied(
        &mut self,
        message: Message,
        zero: &mut ShardedState,
    ) -> Result<(SegmentId, Buffer), Error> {
        let (Content::TiedGradient { segment, .. } | Content::TiedParameters { segment }) = message.content else {
            return Err(internal("expected a message of a tied segment, but it carries activations or gradients"));
        };
        match self.expected(message, zero)? {
            Expected::Tied(pending) => Ok((segment, pending.wait()?)),
            _ => Err(internal("expected a tied segment, but the posted receive is for activations or gradients")),
        }
    }
}

/// Broadcasts tensors of stage `root` to the host memory of all stages. `ours` is `None` on the other stages.
/// Collective over the pipe group.
pub(crate) fn share(groups: &Groups, root: StageId, ours: Option<Activations>) -> Result<Activations, Error> {
    let Some(comm) = groups.pipe(Kind::Activations) else {
        return ours.ok_or_else(|| internal("the only stage passed no outputs to share"));
    };
    let own: Option<Vec<(DType, Vec<usize>)>> =
        ours.as_ref().map(|x| x.tensors().iter().map(|x| (x.dtype(), x.dims().to_vec())).collect());
    let words = own.as_deref().map(words).unwrap_or_default();
    let length = comm.broadcast(Buffer::I64(vec![words.len() as i64]), root).wait()?.into_i64()?[0];
    let words = if own.is_some() { words } else { vec![0; length as usize] };
    let words = comm.broadcast(Buffer::I64(words), root).wait()?.into_i64()?;
    let shapes = tensors(&words).ok_or_else(|| internal("cannot decode the announced dtypes and shapes"))?;
    let mut made = vec![];
    for (index, (dtype, dims)) in shapes.iter().enumerate() {
        let buffer = match &ours {
            Some(ours) => buffer_of(&ours.tensors()[index])?,
            None => room(*dtype, dims.iter().product()),
        };
        let values = storage_of(comm.broadcast(buffer, root).wait()?, *dtype)?;
        made.push(tensor(&Device::Cpu, values, dims.as_slice(), false)?);
    }
    Ok(Activations::new(made))
}

fn posted<'a>(
    comm: &dyn Communicator,
    device: &Device,
    from: StageId,
    tensors: impl Iterator<Item = &'a (DType, Vec<usize>)>,
) -> Result<Vec<Pending<Buffer>>, Error> {
    tensors.map(|(dtype, dims)| Ok(comm.recv(receive_buffer(*dtype, dims.iter().product(), device)?, from))).collect()
}

/// Copies a tensor to a send buffer. The buffer is on the GPU if the transport sends from there, and otherwise on the
/// host.
fn send_buffer(tensor: &Tensor, device: &Device) -> Result<Buffer, Error> {
    match is_sent_from_gpu(tensor.dtype(), device) {
        true => Ok(gpu_copy(tensor)?),
        false => buffer_of(tensor),
    }
}

/// Allocates a receive buffer in the same memory that [`send_buffer`] uses.
fn receive_buffer(dtype: DType, elements: usize, device: &Device) -> Result<Buffer, Error> {
    match is_sent_from_gpu(dtype, device) {
        true => Ok(gpu_room(device, dtype, elements)?),
        false => Ok(room(dtype, elements)),
    }
}

/// Returns whether tensors of this dtype travel from GPU to GPU. All stages agree, because the result depends only on
/// the dtype and the transport.
fn is_sent_from_gpu(dtype: DType, device: &Device) -> bool {
    device.is_cuda() && matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Turns a received buffer into a tensor on this rank's device.
fn arrived(device: &Device, buffer: Buffer, dtype: DType, dims: &[usize], is_leaf: bool) -> Result<Tensor, Error> {
    if buffer.is_on_device() {
        return Ok(gpu_tensor(buffer, dims, is_leaf)?);
    }
    Ok(tensor(device, storage_of(buffer, dtype)?, dims, is_leaf)?)
}

fn layer_of(message: &Message) -> Result<LayerId, Error> {
    match message.content {
        Content::Activations { layer, .. } | Content::Gradients { layer, .. } => Ok(layer),
        _ => Err(internal("expected activations or gradients, but the message is of a tied segment")),
    }
}

fn internal(what: &str) -> Error {
    Error::Zero(ZeroError::Internal(what.into()))
}
