import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.digests import digest_from_record, digest_of, digest_to_record


@given(st.binary())
def test_record_fields_round_trip(data):
    assert digest_from_record(digest_to_record(digest_of(data))) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("field", ["md5=abc", "sha256=", "sha256=AAAA", "sha256=*", ""])
def test_other_fields_are_refused(field):
    with pytest.raises(ValueError, match="RECORD hash"):
        digest_from_record(field)
