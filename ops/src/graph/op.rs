//! Operations with one to three inputs, and their form as a node of candle's graph or on the tape of a fused block.

use crate::graph::storage::swap;
use crate::meta::footprint::{Exchange, Footprint};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};

/// An operation with `N` inputs.
pub(crate) trait Op<const N: usize>: Footprint + Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// Runs the forward on the CPU.
    ///
    /// # Errors
    /// Fails if the inputs do not match.
    fn cpu_fwd(&self, inputs: Inputs<'_, CpuStorage, N>) -> Result<(CpuStorage, Shape)>;

    /// Runs the forward on a GPU.
    ///
    /// # Errors
    /// Fails if the inputs do not match, or the operation is unsupported on a GPU.
    fn cuda_fwd(&self, _: Inputs<'_, CudaStorage, N>) -> Result<(CudaStorage, Shape)> {
        bail!("{}: unsupported on a GPU", self.name())
    }

    /// Returns the gradients of the inputs, given the output and its gradient `dy`. The gradient of an input is `None`
    /// if the input needs none, or if the sink took it.
    ///
    /// # Errors
    /// Fails if the forward has not run, or the backward is unsupported.
    fn bwd(&self, inputs: [&Tensor; N], output: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; N]>;
}

/// The values and the layouts of the inputs.
pub(crate) type Inputs<'a, S, const N: usize> = [(&'a S, &'a Layout); N];

/// Returns the first `N` gradients, for an operation whose last input is optional.
pub(crate) fn leading<const N: usize>(gradients: [Option<Tensor>; 3]) -> [Option<Tensor>; N] {
    let mut gradients = gradients.into_iter();
    std::array::from_fn(|_| gradients.next().flatten())
}

/// An operation on the tape of a fused block.
pub(crate) trait Taped: Send + Sync {
    /// Returns the gradients of the inputs, as [`Op::bwd`] does.
    fn gradients(&self, inputs: &[&Tensor], output: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>>;

    /// Makes the values of `output` again from `x`.
    fn remake(&self, x: &Tensor, output: &Tensor) -> Result<()>;

    /// Returns the exchange that restores the values, if it can overlap with other operations.
    fn exchange(&self) -> Option<&dyn Exchange>;
}

/// An operation with `N` inputs in candle's graph or on a tape.
pub(crate) struct Node<const N: usize, O>(pub(crate) O);

impl<const N: usize, O: Op<N>> Taped for Node<N, O> {
    fn gradients(&self, inputs: &[&Tensor], output: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        self.0.bwd(std::array::from_fn(|i| inputs[i]), output, dy).map(Vec::from)
    }

    fn remake(&self, x: &Tensor, output: &Tensor) -> Result<()> {
        swap(output, self.0.make(x)?).map(drop)
    }

    fn exchange(&self) -> Option<&dyn Exchange> {
        self.0.exchange()
    }
}

/// A custom operation of candle with `N` inputs.
pub(crate) trait CustomOp<const N: usize> {
    /// Computes the output and adds the operation to candle's graph.
    fn apply(self, inputs: [&Tensor; N]) -> Result<Tensor>;
}

macro_rules! node {
    ($n:literal $custom:ident $apply:ident $gradients:ty, $x:ident $xs:ident $xl:ident $($y:ident $ys:ident $yl:ident)*) => {
        impl<O: Op<$n>> CustomOp<$n> for Node<$n, O> {
            fn apply(self, [$x, $($y),*]: [&Tensor; $n]) -> Result<Tensor> {
                $x.$apply($($y,)* self)
            }
        }

        impl<O: Op<$n>> $custom for Node<$n, O> {
            fn name(&self) -> &'static str {
                self.0.name()
            }

            fn cpu_fwd(
                &self,
                $xs: &CpuStorage,
                $xl: &Layout,
                $($ys: &CpuStorage, $yl: &Layout),*
            ) -> Result<(CpuStorage, Shape)> {
                self.0.cpu_fwd([($xs, $xl), $(($ys, $yl)),*])
            }

            fn cuda_fwd(
                &self,
                $xs: &CudaStorage,
                $xl: &Layout,
                $($ys: &CudaStorage, $yl: &Layout),*
            ) -> Result<(CudaStorage, Shape)> {
                self.0.cuda_fwd([($xs, $xl), $(($ys, $yl)),*])
            }

            fn bwd(&self, $x: &Tensor, $($y: &Tensor,)* output: &Tensor, dy: &Tensor) -> Result<$gradients> {
                self.0.bwd([$x, $($y),*], output, dy).map(|[$x, $($y),*]| ($x $(, $y)*))
            }
        }
    };
}
node!(1 CustomOp1 apply_op1 Option<Tensor>, x xs xl);
node!(2 CustomOp2 apply_op2 (Option<Tensor>, Option<Tensor>), x xs xl y ys yl);
node!(3 CustomOp3 apply_op3 (Option<Tensor>, Option<Tensor>, Option<Tensor>), x xs xl y ys yl z zs zl);
