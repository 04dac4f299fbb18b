"""One short log in the forms of JSON and in Mooncake's, byte for byte: a change here is one for all who read them."""

import pytest
from tests.wire.blocks import Log

from kvist.wire import Encoder, Recorder, RunNames, decode_line
from kvist.wire.mooncake import decode

GOLDEN = {
    "kvist": (
        b'{"event":"stored","worker":"7","rank":2,"id":0,"epoch":77,"time_s":1.5,"hashes":[372'
        b'1013757666211656],"tokens":[1,70000],"block_size":2,"group":0,"tier":"device","start'
        b'":0,"priorities":[35],"namespace":[],"hash_name":"kvist_sha256","reason":"computed"}'
        b'\n{"event":"removed","worker":"7","rank":2,"id":1,"epoch":77,"time_s":1.5,"hashes":[3'
        b'721013757666211656],"group":0,"tier":"host","namespace":[],"hash_name":"kvist_sha256'
        b'","reason":"made room"}\n{"event":"cleared","worker":"7","rank":2,"id":2,"epoch":77,"'
        b'time_s":1.5,"reason":"reset"}\n'
    ),
    "trtllm": (
        b'[{"event_id":0,"data":{"type":"stored","parent_hash":null,"blocks":[{"type":"stored_'
        b'block","block_hash":3721013757666211656,"tokens":[{"type":"unique_token","token_id":'
        b'1,"token_extra_id":0},{"type":"unique_token","token_id":70000,"token_extra_id":0}],"'
        b'cache_level":0,"priority":35}]},"window_size":2147483647,"attention_dp_rank":2,"hash'
        b'_algo":"kvist_sha256","layer_group_id":0},{"event_id":1,"data":{"type":"removed","bl'
        b'ock_hashes":[3721013757666211656]},"window_size":2147483647,"attention_dp_rank":2,"h'
        b'ash_algo":"kvist_sha256","layer_group_id":0}]'
    ),
    "dynamo": (
        b'[{"worker_id":7,"storage_tier":"device","event":{"event_id":0,"data":{"stored":{"par'
        b'ent_hash":null,"blocks":[{"block_hash":3721013757666211656,"tokens_hash":54412361270'
        b'82747962,"mm_extra_info":null}]}},"dp_rank":2}},{"worker_id":7,"storage_tier":"host_'
        b'pinned","event":{"event_id":1,"data":{"removed":{"block_hashes":[3721013757666211656'
        b']}},"dp_rank":2}},{"worker_id":7,"storage_tier":"device","event":{"event_id":2,"data'
        b'":"cleared","dp_rank":2}}]'
    ),
    "mooncake": (
        b"\x93\xcd\x05\xdc\x93\xde\x00\x12\xa8event_id\x00\xa9timestamp\xcd\x05\xdc\xaaevent_type\xa6s"
        b"tored\xaablock_size\x02\xafadditional_salt\xc0\xa9lora_name"
        b"\xc0\xa6medium\xa3gpu\xa7dp_rank\x02\xaabackend_id\xa5kvist\xaamodel"
        b"_name\xa5model\xa9tenant_id\xa7default\xa8group_id\xa10\xaaseq"
        b"_hashes\x91\xcf3\xa3\xb2L>\t7H\xaebase_block_idx\x00\xabparent_has"
        b"h\xc0\xa9token_ids\x92\x01\xce\x00\x01\x11p\xb4connector_block_hash\xb033a"
        b"3b24c3e093748\xaaobject_key\xbemodel@group:0@33a3b"
        b"24c3e093748\x8f\xa8event_id\x01\xa9timestamp\xcd\x05\xdc\xaaevent_ty"
        b"pe\xa7removed\xaablock_size\xc0\xafadditional_salt\xc0\xa9lora"
        b"_name\xc0\xa6medium\xa3cpu\xa7dp_rank\x02\xaabackend_id\xa5kvist\xaa"
        b"model_name\xa5model\xa9tenant_id\xa7default\xa8group_id\xa1"
        b"0\xaaseq_hashes\x91\xcf3\xa3\xb2L>\t7H\xaebase_block_idx\xc0\xaaobjec"
        b"t_key\xbemodel@group:0@33a3b24c3e093748\x8b\xa8event_"
        b"id\x02\xa9timestamp\xcd\x05\xdc\xaaevent_type\xa7cleared\xaablock_si"
        b"ze\xc0\xafadditional_salt\xc0\xa9lora_name\xc0\xa6medium\xc0\xa7dp_r"
        b"ank\x02\xaabackend_id\xa5kvist\xaamodel_name\xa5model\xa9tenan"
        b"t_id\xa7default\x02"
    ),
}


@pytest.mark.parametrize("form", GOLDEN)
def test_a_log_has_these_bytes(form):
    log = Log(block_size=2)
    run = log.run([1, 70_000])
    events = [log.stored(run), log.removed(run, tier="host"), log.cleared()]
    recorder = Recorder(RunNames(short=True), clock=lambda: 1.5, worker="7", rank=2)
    assert Encoder(form, recorder)(events) == GOLDEN[form]


@pytest.mark.parametrize("form", GOLDEN)
def test_these_bytes_are_read(form):
    lines = GOLDEN[form].splitlines() if form == "kvist" else [GOLDEN[form]]
    records = decode(lines[0]) if form == "mooncake" else [each for line in lines for each in decode_line(line, form)]
    assert [type(each).__name__ for each in records][:2] == ["StoredBlocks", "RemovedBlocks"]
    assert {(each.hashes, each.rank) for each in records[:2]} == {((3721013757666211656,), 2)}
