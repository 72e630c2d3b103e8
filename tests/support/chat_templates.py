"""Chat templates of the kinds that models come with, short, and written for the tests."""

from __future__ import annotations

from typing import Final

CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# header and end of each turn; tools as JSON in the first user message; a call as JSON
LLAMA_3: Final = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = "" %}{% endif %}
{{- "<|im_start|>system<|end_header|>\\n\\nToday: " + date_string + "\\n" + system + "<|im_end|>" }}
{%- for message in messages %}
    {%- if tools is not none and loop.first %}
        {{- "<|im_start|>user<|end_header|>\\n\\nGiven these functions:\\n" }}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{% endfor %}
        {{- message['content'] | trim + "<|im_end|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant<|end_header|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|im_end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|im_start|>ipython<|end_header|>\\n\\n" + message.content | tojson + "<|im_end|>" }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '<|end_header|>\\n\\n' }}
        {{- message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|end_header|>\\n\\n' }}{% endif %}
"""

# strict turns; nothing opens an answer, so add_generation_prompt changes nothing
MISTRAL: Final = """{{ bos_token }}
{%- if tools is not none and tools | length > 0 %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {%- if loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}{% endif %}
        {{- '[INST] ' + m['content'] + ' [/INST]' }}
    {%- elif m['role'] == 'assistant' and m.tool_calls is defined %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id}
                | tojson }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m['role'] == 'assistant' %}
        {{- ' ' + m['content'] | trim + eos_token }}
    {%- elif m['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.tool_call_id + ': ' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}
{%- endfor %}
"""

# thinking that can be switched off, and that goes out of old turns; content as text or as parts
QWEN_3: Final = """{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content %}{{- part.text }}{% endfor %}{% endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{% endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text_of(message.content) %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

ALL: Final = {"chatml": CHATML, "llama": LLAMA_3, "mistral": MISTRAL, "qwen": QWEN_3}
