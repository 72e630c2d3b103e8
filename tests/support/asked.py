"""Requests as clients write them, and a tiny model to check them against."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from protos import inference_pb2 as pb
from scheduler_svc.front.served_model import Model
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.fake_engine import FACTS
from tests.support.small_tokenizers import chat

TOKENIZER = Tokenizer(chat())
MODEL = Model.of("tiny", FACTS, TOKENIZER)  # 300 tokens in the vocabulary, 128 of context
END = TOKENIZER.eos_token_ids[0]


def request(**fields: Any) -> pb.GenerateRequest:
    return json_format.ParseDict({"text": "hello", **fields}, pb.GenerateRequest())


def sampling(**fields: Any) -> pb.GenerateRequest:
    return request(sampling=fields)


def chat_request(*messages: tuple[str, str]) -> pb.GenerateRequest:
    listed = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=listed))
