//! Small templates in the style of well-known models. They mark the text that the assistant generates.

/// ChatML, as in Qwen. A system message describes the tools.
pub(crate) const CHATML: &str = r"
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- '[' + (tool | tojson) + ']' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if message.content is string %}
                {{- message['content'] }}
            {%- endif %}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool_response>' + message.content.strip() + '</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
";

/// Llama 3. Contents are trimmed, and the header ends with an empty line.
pub(super) const LLAMA: &str = r"{{- bos_token }}
{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if role == 'assistant' %}
        {%- generation %}{{- (message.content or '') | trim }}{{- '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}";

/// Gemma. The system prompt is part of the first user message, and roles must alternate.
pub(super) const GEMMA: &str = r"{{ bos_token }}
{%- set ns = namespace(first='') -%}
{%- if messages[0].role == 'system' -%}
    {%- set ns.first = messages[0].content + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}
{{ '<start_of_turn>model\n' }}{% generation %}{{ message.content | trim }}{{ '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}
    {%- else -%}
{{ '<start_of_turn>' + message.role + '\n' + (ns.first if loop.first else '') }}
        {%- if message.content is string -%}
{{ message.content | trim }}
        {%- elif message.content is iterable -%}
            {%- for part in message.content -%}
{{ '<start_of_image>' if part.type == 'image' else part.text | trim }}
            {%- endfor -%}
        {%- else -%}
            {{- raise_exception('no content') -}}
        {%- endif -%}
{{ '<end_of_turn>\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}";

/// Phi. Every conversation ends with the `eos_token`.
pub(super) const PHI: &str = r"{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>\n' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}";

/// Phi-4-mini. An answer begins right after its header, and every conversation ends with the `eos_token`.
pub(super) const PHI4: &str = r"{% for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none -%}
{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{%- elif message['role'] == 'assistant' -%}
{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}
{%- else -%}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}";

/// Mistral. An answer has no header, and ends with the `eos_token`.
pub(super) const MISTRAL: &str = r"{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}";

/// Returns the template without its generation marks.
pub(super) fn without_marks(template: &str) -> String {
    ["{% generation %}", "{%- generation %}", "{% endgeneration %}", "{%- endgeneration %}"]
        .iter()
        .fold(template.to_string(), |text, tag| {
            text.replace(tag, if tag.contains('-') { "{%- if true %}{%- endif %}" } else { "" })
        })
}
