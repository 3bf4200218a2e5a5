//! Selects the instruction set that kernels use, among the sets that the processor supports. The user can configure the
//! choice.
//!
//! Kernels are compiled for each variant of [`Vectors`]. Their results are bit-identical for all variants, so a
//! narrower set changes only the speed. Products of two bf16 operands are the one exception: AMX adds their terms in a
//! different order, and AMX and AVX512_BF16 treat numbers below 2⁻¹²⁶ as 0.
//!
//! Users choose with the environment variable [`VARIABLE`] or the configuration key `launcher.instruction_set`; the
//! variable takes precedence.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(target_arch = "x86_64")]
mod x86;

/// The environment variable that selects the instruction set of this process.
pub const VARIABLE: &str = "ZERO_TRAIN_ISA";

/// Whether this is a development build. `zero-ops` cannot use its own `debug_assertions` for this: it is compiled
/// without them even in development builds, because its innermost loops would be several times slower with them.
pub const IS_DEVELOPMENT: bool = cfg!(debug_assertions);

/// An instruction set that this processor supports. Values other than [`Isa::BASELINE`] exist only after detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Set);

/// The named instruction sets, narrowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Baseline,
    Neon,
    Avx2,
    Avx512,
    Amx,
}

/// The vector registers that a kernel uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vectors {
    /// Scalar code, compiled for the target's baseline.
    Baseline,
    /// NEON: 32 registers of 128 bits; part of the aarch64 baseline.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// AVX2 and FMA: 16 registers of 256 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL, AVX2 and FMA: 32 registers of 512 bits.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Set {
    const ALL: [Set; 5] = [Set::Baseline, Set::Neon, Set::Avx2, Set::Avx512, Set::Amx];

    fn name(self) -> &'static str {
        match self {
            Set::Baseline => "baseline",
            Set::Neon => "neon",
            Set::Avx2 => "avx2",
            Set::Avx512 => "avx512",
            Set::Amx => "amx",
        }
    }

    fn is_here(self) -> bool {
        match self {
            Set::Baseline => true,
            Set::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => x86::has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => x86::has_avx512(),
            #[cfg(target_arch = "x86_64")]
            Set::Amx => x86::has_avx512() && x86::has_amx(),
            #[cfg(not(target_arch = "x86_64"))]
            Set::Avx2 | Set::Avx512 | Set::Amx => false,
        }
    }
}

impl Isa {
    /// Scalar code. Tests compare the other sets with this one.
    pub const BASELINE: Isa = Isa(Set::Baseline);

    /// Every set that this processor supports and this process may use, narrowest first.
    #[must_use]
    pub fn available() -> Vec<Isa> {
        Set::ALL.into_iter().filter(|set| set.is_here()).map(Isa).collect()
    }

    /// The set that kernels use: the chosen set, or else the widest set that this processor supports.
    ///
    /// # Panics
    /// Panics if [`Isa::choose`] was never called and [`VARIABLE`] names a set that cannot be used.
    #[inline]
    #[must_use]
    pub fn current() -> Isa {
        match CURRENT.load(Ordering::Relaxed) {
            0 => Self::first(),
            number => Isa(Set::ALL[usize::from(number) - 1]),
        }
    }

    #[cold]
    fn first() -> Isa {
        match Self::choose(None) {
            Ok(isa) => isa,
            Err(unavailable) => panic!("{VARIABLE}: {unavailable}: {}", unavailable.help()),
        }
    }

    /// Sets the instruction set of this process: the set that [`VARIABLE`] names, else the `configured` set, else the
    /// widest set.
    ///
    /// # Errors
    /// Fails if the name is unknown, or this processor lacks the set.
    pub fn choose(configured: Option<&str>) -> Result<Isa, Unavailable> {
        let variable = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        let isa = match (&variable, configured) {
            (Some(name), _) => named(&name.to_string_lossy(), VARIABLE)?,
            (None, Some(name)) => named(name, CONFIGURED)?,
            (None, None) => Self::available().pop().unwrap_or(Isa::BASELINE),
        };
        CURRENT.store(isa.0 as u8 + 1, Ordering::Relaxed);
        Ok(isa)
    }

    /// The vector registers of this set.
    #[inline]
    #[must_use]
    pub fn vectors(self) -> Vectors {
        match self.0 {
            #[cfg(target_arch = "aarch64")]
            Set::Neon => Vectors::Neon,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => Vectors::Avx2,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 | Set::Amx => Vectors::Avx512,
            _ => Vectors::Baseline,
        }
    }

    /// Whether products of bf16 operands may use AMX's tiles.
    #[inline]
    #[must_use]
    pub fn has_amx(self) -> bool {
        self.0 == Set::Amx
    }

    /// The name of this set, as [`VARIABLE`] takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name()
    }
}

/// The index of the current set plus one; 0 until a set is chosen or first used.
static CURRENT: AtomicU8 = AtomicU8::new(0);

/// The configuration key that names a set.
const CONFIGURED: &str = "launcher.instruction_set";

fn named(name: &str, source: &'static str) -> Result<Isa, Unavailable> {
    name.parse().map_err(|()| Unavailable { name: name.to_string(), source })
}

impl FromStr for Isa {
    type Err = ();

    fn from_str(name: &str) -> Result<Isa, ()> {
        Self::available().into_iter().find(|isa| isa.name() == name).ok_or(())
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A requested set that cannot be used on this processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    name: String,
    source: &'static str,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        if Set::ALL.iter().any(|set| set.name() == name) {
            write!(f, "this processor does not support {name}")
        } else {
            write!(f, "unknown instruction set `{name}`")
        }
    }
}

impl std::error::Error for Unavailable {}

impl Unavailable {
    /// The environment variable or configuration key that named the set.
    #[must_use]
    pub fn source(&self) -> &'static str {
        self.source
    }

    /// Suggests how to fix the choice.
    #[must_use]
    pub fn help(&self) -> String {
        let here: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
        format!("choose one of {}, or remove it to use the widest", here.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_set_has_its_name_and_the_narrowest_is_first() {
        let all = Isa::available();
        assert_eq!(all[0], Isa::BASELINE);
        for isa in all {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
    }

    #[test]
    fn unavailable_sets_are_reported_with_their_source() {
        let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        let error = named(foreign, VARIABLE).expect_err("of another architecture");
        assert_eq!(
            (error.to_string(), error.source()),
            (format!("this processor does not support {foreign}"), "ZERO_TRAIN_ISA")
        );
        assert!(error.help().starts_with("choose one of baseline"));
        let error = named("sse9", CONFIGURED).expect_err("no set");
        assert_eq!(error.to_string(), "unknown instruction set `sse9`");
    }

    #[test]
    fn the_configured_set_holds_until_another_is_chosen() {
        if std::env::var_os(VARIABLE).is_some() {
            println!("skipped: {VARIABLE} is set");
            return;
        }
        assert_eq!(Isa::choose(Some("baseline")), Ok(Isa::BASELINE));
        assert_eq!(Isa::current(), Isa::BASELINE);
        assert!(Isa::choose(Some("sse9")).is_err());
        assert_eq!(Isa::current(), Isa::BASELINE);
        assert_eq!(Isa::choose(None).ok(), Isa::available().pop());
    }
}
