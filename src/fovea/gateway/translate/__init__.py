"""Translation of Anthropic's Messages API and OpenAI's Responses API to chat completions, and back.

Many engines answer /v1/chat/completions alone. The gateway offers the other two APIs in front of them:

    translation = to_chat("messages", body)     a request; its `body` is what the backend gets
    translation.answer(200, chat)               a complete answer
    translation.translator()                    a StreamTranslator: bytes of events in, bytes of events out

The wire models of requests, their conversion and the writers of answers are those of `fovea.api`, which the
server uses, too. Here is what a gateway needs beside them: to read what backends answer. No part does I/O.
"""
