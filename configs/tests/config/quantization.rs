//! `quantization_config`: the keys of `BitsAndBytesConfig`.

use zero_config::{Config, FourBit};

fn parse(keys: &str) -> Result<Config, String> {
    let text = format!("train_batch_size: 1\nquantization_config: {{{keys}}}");
    Config::parse("ds.yaml", text).map_err(|errors| errors.to_string())
}

/// The keys come from `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()`, without those that
/// have no effect.
#[test]
fn bitsandbytes_keys_are_read() {
    let config = parse(
        "quant_method: bitsandbytes, load_in_8bit: false, load_in_4bit: true, llm_int8_threshold: 0.0, \
         llm_int8_skip_modules: null, llm_int8_enable_fp32_cpu_offload: false, llm_int8_has_fp16_weight: false, \
         bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: false, bnb_4bit_compute_dtype: float32, \
         bnb_4bit_quant_storage: uint8",
    )
    .unwrap();
    let quantization = config.quantization_config.unwrap();
    assert!(quantization.load_in_4bit && quantization.bnb_4bit_quant_type == FourBit::Nf4);
    let plain = parse("load_in_4bit: true").unwrap().quantization_config.unwrap();
    assert_eq!(plain.bnb_4bit_quant_type, FourBit::Fp4, "the default of BitsAndBytesConfig");
    assert!(Config::parse("ds.yaml", "train_batch_size: 1").unwrap().quantization_config.is_none());
}

#[test]
fn keys_without_effect_are_refused() {
    let refused = |keys: &str, words: &[&str]| {
        let error = parse(keys).expect_err(keys);
        assert!(words.iter().all(|word| error.contains(word)), "{keys}: {error}");
    };
    assert!(!parse("").unwrap().quantization_config.unwrap().quantizes());
    refused("bnb_4bit_quant_type: nf4", &["bnb_4bit_quant_type", "has no effect", "load_in_4bit"]);
    refused("llm_int8_skip_modules: [a]", &["llm_int8_skip_modules", "has no effect"]);
    refused("load_in_4bit: true, load_in_8bit: true", &["both 4 and 8 bits"]);
    refused("load_in_8bit: true, bnb_4bit_quant_type: nf4", &["bnb_4bit_quant_type", "remove it"]);
    refused("load_in_8bit: true, bnb_4bit_use_double_quant: true", &["bnb_4bit_use_double_quant"]);
    refused("load_in_4bit: true, bnb_4bit_compute_dtype: bfloat16", &["bnb_4bit_compute_dtype", "bf16.enabled"]);
    refused("load_in_8bit: true, llm_int8_threshold: 6.0", &["llm_int8_threshold", "set it to 0"]);
    refused("load_in_4bit: true, quant_method: gptq", &["quant_method", "bitsandbytes"]);
    refused("load_in_4bit: true, llm_int8_has_fp16_weight: true", &["llm_int8_has_fp16_weight"]);
}
