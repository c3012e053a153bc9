-- Changes a job's weights (service/weight_rules.py) if they are still what was read; a version may be published in the same step.
-- ARGV: weights as read, new weights, spec as read or '' (whatever it is), running update's id or '', ended update's field and record
-- or '' twice, field of an update that is forgotten or '', version to publish or '', whether it is a rollback ('1'), lineage as read
-- (the labels of an update name it).
-- Reply: ok; changed: read again. What always holds: a version is published by the step that ends its update, once.
local job = read_job()
if not job then return reply('missing') end
if (call('HGET', JOB, 'weights') or '') ~= ARGV[1] then return reply('changed') end
if job.lineage ~= tonumber(ARGV[10]) then return reply('changed') end
if ARGV[3] ~= '' and call('HGET', JOB, 'spec') ~= ARGV[3] then return reply('changed') end
call('HSET', JOB, 'weights', ARGV[2], 'updating', ARGV[4])
if ARGV[5] ~= '' then call('HSET', JOB, ARGV[5], ARGV[6]) end
if ARGV[7] ~= '' then call('HDEL', JOB, ARGV[7]) end
local version, rollback = tonumber(ARGV[8]), ARGV[9] == '1'
if version and (rollback or version > job.version) then publish_version(version, rollback, seconds()) end
return reply('ok')
