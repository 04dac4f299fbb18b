"""What Kvist is measured against: `field` works as the field's Python managers do, `lean` is the least one can do."""
