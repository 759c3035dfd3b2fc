"""The real model in int8 and int4 against CTranslate2: how fast, and how close to fp32."""
