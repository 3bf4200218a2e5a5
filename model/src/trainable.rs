//! Selects the trainable parameters by patterns for their names.

use glob::Pattern;

use crate::build_error::BuildError;
use crate::parameter::Parameter;

/// Maximum number of names that an error lists.
const LISTED: usize = 8;

/// Which parameters are trainable. The default is all.
///
/// Patterns are globs over the full name: `*` matches any characters including dots, `?` matches one character, and
/// `[…]` matches one character of a set. A parameter is trainable if a pattern of `trainable` matches it (or
/// `trainable` is not given) and no pattern of `frozen` matches it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trainable {
    trainable: Option<Vec<Pattern>>,
    frozen: Vec<Pattern>,
}

impl Trainable {
    /// Selects parameters that match one of `trainable`, or all if it is `None`, except those that match one of
    /// `frozen`.
    ///
    /// # Errors
    /// Fails if a pattern is malformed.
    pub fn new<S: AsRef<str>>(trainable: Option<&[S]>, frozen: &[S]) -> Result<Self, BuildError> {
        let parsed = |patterns: &[S]| patterns.iter().map(|pattern| parse(pattern.as_ref())).collect();
        Ok(Self { trainable: trainable.map(parsed).transpose()?, frozen: parsed(frozen)? })
    }

    /// Returns whether the parameter of this name is trainable.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        let any = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
        self.trainable.as_deref().is_none_or(any) && !any(&self.frozen)
    }

    /// Checks that each pattern matches one of the parameters.
    ///
    /// # Errors
    /// Fails with [`BuildError::UnmatchedPattern`].
    pub fn check_matches(&self, parameters: &[Parameter]) -> Result<(), BuildError> {
        let unmatched = |pattern: &&Pattern| !parameters.iter().any(|parameter| pattern.matches(parameter.name()));
        if let Some(pattern) = self.trainable.iter().flatten().chain(&self.frozen).find(unmatched) {
            let names = parameters.iter().map(|parameter| parameter.name());
            return Err(BuildError::UnmatchedPattern { pattern: pattern.to_string(), names: like(pattern, names) });
        }
        Ok(())
    }

    /// Checks the selection against the parameters of a model that was built with it.
    pub(crate) fn check(&self, parameters: &[Parameter]) -> Result<(), BuildError> {
        self.check_matches(parameters)?;
        match parameters.iter().any(Parameter::is_trainable) || parameters.is_empty() {
            true => Ok(()),
            false => Err(BuildError::NothingTrainable),
        }
    }
}

fn parse(pattern: &str) -> Result<Pattern, BuildError> {
    let malformed = |error: glob::PatternError| BuildError::Pattern { pattern: pattern.into(), reason: error.msg };
    Pattern::new(pattern).map_err(malformed)
}

/// Lists names that share a part with the pattern. If there are none, lists the first names.
fn like<'a>(pattern: &Pattern, names: impl Iterator<Item = &'a str> + Clone) -> Vec<String> {
    let parts: Vec<&str> = pattern.as_str().split(['*', '?', '[', ']', '.']).filter(|part| part.len() > 2).collect();
    let shared = |name: &&str| parts.iter().filter(|part| name.contains(*part)).count();
    let most = names.clone().map(|name| shared(&name)).max().unwrap_or(0);
    names.filter(|name| shared(name) == most).take(LISTED).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layers, zoo};
    use candle_core::DType;

    fn build(trainable: Option<&[&str]>, frozen: &[&str]) -> Result<Vec<String>, BuildError> {
        let config = zoo::Gpt2Config { n_layer: 2, n_embd: 8, n_head: 2, ..zoo::Gpt2Config::default() };
        let layers: Layers = zoo::gpt2(&config).trainable(Trainable::new(trainable, frozen)?);
        let model = layers.build(DType::F32)?;
        Ok(model.parameters().iter().filter(|p| p.is_trainable()).map(|p| p.name().to_string()).collect())
    }

    #[test]
    fn patterns_select_parameters() {
        let all = build(None, &[]).unwrap();
        assert_eq!(all.len(), 2 + 2 * 12 + 2);
        assert_eq!(build(Some(&["*"]), &[]).unwrap(), all);
        let last = build(Some(&["*.h.1.*", "*ln_f*"]), &["*.bias"]).unwrap();
        assert!(last.iter().all(|name| name.contains("h.1.") || name.contains("ln_f")), "{last:?}");
        assert_eq!(last.len(), 6 + 1);
        assert_eq!(build(None, &["*wte*"]).unwrap().len(), all.len() - 1);
    }

    #[test]
    fn patterns_without_effect_are_errors() {
        let error = |trainable: Option<&[&str]>, frozen: &[&str]| build(trainable, frozen).unwrap_err().to_string();
        let unknown = error(None, &["*.attn.q_proj.*"]);
        assert!(unknown.contains("`*.attn.q_proj.*`") && unknown.contains("attn.c_attn.weight"), "{unknown}");
        assert!(error(None, &["*"]).contains("no parameter is trainable"), "{}", error(None, &["*"]));
        assert!(error(Some(&["[a"]), &[]).contains("`[a`"), "{}", error(Some(&["[a"]), &[]));
    }
}
